"""Observers around one call of Keras' own ``fit``.

The function of a batch tells of each step, a callback of Keras of everything else. Every
method of an observer runs on every rank, as ``collective.training.loop.observer`` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.training.loop.observer import FinishedStep, Observer, methods
from collective.training.loop.position import Position
from collective.training.steps.batch_function import BatchFunction, Step, StepObserver
from collective.training.steps.program import Program


class ObservedFit(StepObserver):
    """Calls observers at the steps and hooks of one call of ``fit``.

    Args:
        model: The model that is fitted.
        late: Makes more observers, innermost of all, once the model has its variables:
            before the first step.

    Attributes:
        position: Its epoch and step, for observers.
        callback: For the callbacks of the call.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        late: Callable[[], Sequence[Observer]],
    ):
        self.position = Position(model, backend)
        self.callback = _Hooks(self)
        self._observers, self._late = list[Observer](), late
        self._has_begun = False

    def add(self, observer: Observer) -> None:
        """Add an observer, outermost of all."""
        self._observers.append(observer)

    def begin(self) -> None:
        """Have observers begin; every rank calls it."""
        self._call("begin")

    def before_step(
        self, function: BatchFunction, program: Program, tensors: Sequence[tf.Tensor]
    ) -> None:
        """Tell of a step of the training."""
        if function.name == "train_step" and function.model is self.position.model:
            if not self._has_begun:
                self._has_begun = True
                self._observers[:0] = self._late()
            self._call("before_step", self.position.step)

    def after_step(self, model: keras.Model, method: str, step: Step) -> None:
        """Tell of a step of the training that has ended."""
        if method == "train_step" and model is self.position.model:
            ended = FinishedStep(
                self.position.step,
                step.begin,
                step.ready,
                step.done,
                time.time(),
                step.report,
                step.data,
            )
            self.position.step += 1
            self._call("after_step", ended)

    def end(self) -> None:
        """Have observers end; every rank calls it."""
        self._call("end")

    def interrupted(self) -> None:
        """Tell observers that an exception ends the call."""
        self._call("interrupted")

    def close(self) -> None:
        """Close all observers."""
        for observer in reversed(self._observers):
            observer.close()

    def _call(self, name: str, *args: object) -> None:
        for method in methods(self._observers, name):
            method(*args)


class _Hooks(keras.callbacks.Callback):
    """What Keras calls between the steps."""

    def __init__(self, observed: ObservedFit):
        super().__init__()
        self._observed = observed

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Note the epoch."""
        self._observed.position.epoch = epoch

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Tell that the validation begins."""
        self._observed._call("before_validation")

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Tell that the validation has ended."""
        found = {name: float(np.mean(v)) for name, v in (logs or {}).items()}
        self._observed._call("after_validation", found)
