"""A context in which Keras' own loops share each batch out over the replicas of a backend."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from collective.training.keras_compat import batch_functions
from collective.training.sharding.held import check_whole
from collective.training.step import finite
from collective.training.steps.batch_function import (
    BatchFunction,
    PredictFunction,
    RunStep,
    StepObserver,
)
from collective.training.steps.settings import StepSettings
from collective.training.steps.whole import WholeStep


@contextlib.contextmanager
def distributed(
    settings: StepSettings,
    observers: Sequence[StepObserver] = (),
    run_step: RunStep | None = None,
    end_eager_step: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Inside, models get functions that share the rows of each batch out.

    Args:
        settings: The backend and the options of the training.
        observers: Called around each step.
        run_step: See ``BatchFunction``.
        end_eager_step: Called after each step of a model that runs eagerly.
    """
    backend = settings.backend
    watch = finite.Watch(backend, settings.options.terminate_on_nan, expected=False)

    def make(model: keras.Model, method: str) -> Any:
        if not settings.is_distributed:
            return None
        if model.run_eagerly:
            check_whole(model, "runs eagerly", "compile it without run_eagerly")
            whole = WholeStep(model, method, settings, observers, end_eager_step)
            return batch_functions.Eager(whole)
        step = getattr(model, method)
        if method != "predict_step":
            return BatchFunction(model, step, method, settings, observers, run_step)
        # It sums nothing: what is attached would be a message of its own.
        attached = settings.attached if settings.is_kept else None
        mine = dataclasses.replace(settings, attached=attached)
        return PredictFunction(model, step, method, mine, observers, run_step)

    with watch.tracing(), batch_functions.made_by(make):
        yield
