"""Keras' files that all ranks of a program write to one path, and exported models.

With one path, ranks would write into each other's file. So each rank writes a file with
a name of its own and renames it, as checkpoints do: a file is always whole, and the
files of all ranks are equal. No rank waits for another, so a program may write on rank
0 alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import keras

from collective.training.calls.scoped_models import strategy_of
from collective.training.keras_compat import entry_points
from collective.training.unedited.files import Arguments, Save, replace_saver
from collective.training.unedited.script_job import ScriptJob

FILES = (".keras", ".h5")


def replace_scoped_savers(job: ScriptJob) -> None:
    """Make ``save`` write by renaming, and ``export`` trace equal values."""
    prefix = f".rank{job.backend.rank}_"

    def side_by_side(path: str, save: Save, arguments: Arguments) -> Any:
        file = path.endswith(FILES) and "://" not in path
        folder, name = os.path.split(path)
        again = name.startswith(prefix)  # by a method that calls another
        if again or not file or not arguments.get("overwrite", True):
            return save(path)
        own = os.path.join(folder, prefix + name)
        result = save(own)
        if os.path.isfile(own):
            os.replace(own, path)
        return result

    for owner, name, parameter in entry_points.savers():
        if name.startswith("save"):
            replace_saver(job, owner, name, parameter, side_by_side)
    job.replace(keras.Model, "export", _of_equal_replicas(keras.Model.export))


def _of_equal_replicas(export: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an export: its functions read equal values, without collectives."""

    @functools.wraps(export)
    def export_together(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            return export(self, *args, **kwargs)
        strategy.extended.average_written()
        with strategy.extended.reading_locally():
            return export(self, *args, **kwargs)

    return export_together
