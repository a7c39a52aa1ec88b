"""Keras' ``fit``, ``evaluate`` and ``predict`` of models made in a strategy's scope.

Stock Keras trains other models under a strategy: it clips before the sum, averages
uneven shards like even ones, and fails on an uneven first batch. So these calls run
``collective.fit``, ``evaluate`` and ``predict``.
"""

from __future__ import annotations

from collective.backends.base import Backend
from collective.distribute.saving import replace_scoped_savers
from collective.training.unedited.calls import are_replaced, route_scoped
from collective.training.unedited.checkpoints import replace_checkpoint_writer
from collective.training.unedited.script_job import ScriptJob

_jobs: list[ScriptJob] = []  # as long as the process


def route(backend: Backend) -> None:
    """Replace the calls for models of our strategies; a second call does nothing.

    It also replaces ``tf.train.Checkpoint`` and Keras' ``save``, because all ranks
    write to the same path.
    """
    if _jobs or are_replaced():
        return
    job = ScriptJob(backend)
    route_scoped(job)
    if backend.size > 1:
        replace_checkpoint_writer(job)
        replace_scoped_savers(job)
    _jobs.append(job)
