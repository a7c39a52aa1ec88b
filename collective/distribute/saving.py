"""Keras' files that all ranks of a program write to one path, and exported models.

With one path, ranks would write into each other's file. Each writes beside it under a name
of its own, and renames that, as checkpoints do: a file is always whole, and those of all
ranks are alike. No rank waits for another, so a program may write on rank 0 alone.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import keras

from collective.distribute.scope import strategy_of
from collective.training.keras_compat import entry_points
from collective.training.unedited.job import Job

FILES = (".keras", ".h5")


def replace_savers(job: Job) -> None:
    """Has ``save`` and ``save_weights`` write side by side, and ``export`` trace values."""
    for owner, name, parameter in entry_points.savers():
        stock = getattr(owner, name)
        if not name.startswith("save"):
            continue
        saver = _side_by_side(stock, parameter, f".rank{job.backend.rank}_")
        if inspect.isclass(owner):
            job.replace(owner, name, saver)
        else:
            for place in entry_points.places_of(stock):
                job.replace(*place, saver)
    job.replace(keras.Model, "export", _of_equal_replicas(keras.Model.export))


def _side_by_side(
    stock: Callable[..., Any], parameter: str, prefix: str
) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def save(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        path = bound.arguments[parameter]
        file = isinstance(path, (str, os.PathLike)) and str(path).endswith(FILES)
        if not file or "://" in str(path) or not bound.arguments.get("overwrite", True):
            return stock(*args, **kwargs)
        folder, name = os.path.split(os.fspath(path))
        if name.startswith(prefix):  # by a method that calls another
            return stock(*args, **kwargs)
        own = os.path.join(folder, prefix + name)
        bound.arguments[parameter] = own
        result = stock(*bound.args, **bound.kwargs)
        if os.path.isfile(own):
            os.replace(own, path)
        return result

    return save


def _of_equal_replicas(export: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a file keeps has no collectives: it reads what is made the same."""

    @functools.wraps(export)
    def export_together(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = strategy_of(self)
        if strategy is None:
            return export(self, *args, **kwargs)
        strategy.extended.average_written()
        with strategy.extended.reading_locally():
            return export(self, *args, **kwargs)

    return export_together
