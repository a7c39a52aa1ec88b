"""Models of which each rank has a part: how a script makes, saves and exports them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.preparation import parts
from collective.training.sharding.held import HeldPart
from collective.training.unedited.script_job import ScriptJob
from collective.training.unedited.tracking import records

#: Options of a script by which all of its models are held in parts.
OPTIONS = ("shard_weights", "shard_optimizer")


def hold_models(job: ScriptJob, options: Mapping[str, Any]) -> None:
    """Have variables cut as soon as the script makes them, until ``job.undo``.

    With ``tensor_parallel`` they wait for their values; see ``ModelAxis``.

    Args:
        options: Of ``collective.fit``.

    Raises:
        UsageError: An option does not work with this backend.
    """
    asked = [name for name in OPTIONS if options.get(name)]
    has_axis = job.backend.options.tensor_parallel > 1
    if has_axis:
        asked.append("tensor_parallel")
    why = _why_not(job)
    if why is not None:
        job.why_not_placing = why
        if asked:
            raise UsageError(
                f"{asked[0]} cuts variables, and {why}",
                hint="backend native, mpi or horovod, without --min-np and --resume",
            )
        return
    if job.backend.size == 1:
        return
    if asked and asked[0] in OPTIONS:
        parts.check(job.backend, asked[0])
    job.placing = placing = parts.of_options(
        job.backend,
        shard_optimizer="shard_optimizer" in asked,
        shard_weights="shard_weights" in asked,
        by_map=not has_axis,
    )
    placing.before_read.append(_refuse_recorders)
    job.enter(placing.waiting() if has_axis else placing.making())
    job.replace(keras.Model, "export", _exporting(keras.Model.export))


def _why_not(job: ScriptJob) -> str | None:
    """Return why the ranks of a job cannot hold parts of variables, or None."""
    if job.by_strategy:
        return f"backend {job.backend.name!r} has no groups of ranks"
    if job.backend.elastic:
        return "with --min-np a rank that dies would take its part with it"
    if job.units.are_kept:
        return "what --resume keeps of a script are whole variables"
    return None


def _exporting(stock: Any) -> Any:
    """Surround ``Model.export``, for which TensorFlow needs variables that are whole."""

    @functools.wraps(stock)
    def export(self: keras.Model, *args: Any, **more: Any) -> Any:
        with keras_compat.held_parts.made_whole(self.variables):
            return stock(self, *args, **more)

    return export


def _refuse_recorders(held: HeldPart) -> None:
    """Refuse to gather for a callback that runs on rank 0 alone."""
    for callback in keras_compat.entry_points.callbacks_that_run():
        if records(callback):
            raise UsageError(
                f"{type(callback).__name__} runs on rank 0 alone and reads {held.path!r}, "
                "which the ranks hold in parts",
                hint="a callback that reads no weights, as TensorBoard with "
                "histogram_freq=0",
                everywhere=False,
            )
