"""Calls of ``keras.Model`` in an unedited script: Keras' own, made by all ranks together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras

from collective.fit_options import FitOptions
from collective.training.steps.distributed import distributed
from collective.training.steps.settings import StepSettings
from collective.training.unedited.script_job import EVALUATE, FIT, PREDICT, ScriptJob

_CALLS = {"fit": FIT, "evaluate": EVALUATE, "predict": PREDICT}


def distribute_calls(job: ScriptJob, options: Mapping[str, Any]) -> None:
    """Have Keras' own loops share the rows of each batch out over the ranks.

    Args:
        options: Of ``collective.fit``.
    """
    settings = StepSettings(job.backend, FitOptions(**options))
    job.enter(distributed(settings))
    for name, call in _CALLS.items():
        job.replace(keras.Model, name, _together(job, call, getattr(keras.Model, name)))


def _together(
    job: ScriptJob, call: str, stock: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a method of Keras that all ranks call together."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if job.inside:
            return stock(self, *args, **kwargs)
        signature.bind(self, *args, **kwargs)  # a TypeError as Keras' own
        with job.calling(call):
            return stock(self, *args, **kwargs)

    method.stock = stock  # type: ignore[attr-defined]
    return method
