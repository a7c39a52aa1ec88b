"""Models of which each rank has a part: how a script makes, saves and exports them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.preparation.parts import check
from collective.training.sharding.held import HeldPart
from collective.training.sharding.placing import Placing
from collective.training.unedited.script_job import ScriptJob
from collective.training.unedited.tracking import records

#: Options of a script by which all of its models are held in parts.
OPTIONS = ("shard_weights", "shard_optimizer")


def hold_models(job: ScriptJob, options: Mapping[str, Any]) -> None:
    """Have variables cut as soon as the script makes them, until ``job.undo``.

    Args:
        options: Of ``collective.fit``, and ``shard_weights``.

    Raises:
        UsageError: An option does not work with this backend.
    """
    if job.backend.options.tensor_parallel > 1:
        raise UsageError(
            "tensor_parallel is for train.py and collective.fit",
            hint="keras.distribution.ModelParallel in the script (docs/how-to/parallel.md)",
        )
    asked = [name for name in OPTIONS if options.get(name)]
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
    if asked:
        check(job.backend, asked[0])
    job.placing = placing = Placing(
        job.backend, OPTIONS[0] in asked, OPTIONS[1] in asked
    )
    placing.before_read.append(_refuse_recorders)
    job.enter(placing.making())
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
