"""The step of a model that runs eagerly: whole, on every rank.

``run_eagerly=True`` leaves no graph that could be partitioned. Every rank has the whole
batch, and the same random numbers, so each computes what one process computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.training import keras_compat
from collective.training.input.leaves import count_rows, first_leaf
from collective.training.process import interrupts
from collective.training.steps import report
from collective.training.steps.batch_function import Step, StepObserver, running
from collective.training.steps.settings import StepSettings
from collective.training.steps.whole_step import gradients_of_rank_zero, say


class WholeStep:
    """A step of Keras on whole batches, for Keras' own function.

    Args:
        method: The name of a method of the model.
        observers: Called after each step.
        ended: Called after each step, or None.
    """

    def __init__(
        self,
        model: keras.Model,
        method: str,
        settings: StepSettings,
        observers: Sequence[StepObserver] = (),
        ended: Callable[[], None] | None = None,
    ):
        self._model, self._method, self._settings = model, method, settings
        self._step, self._backend = getattr(model, method), settings.backend
        self._observers, self._ended = observers, ended
        self._number = 0

    def __call__(self, data: Any) -> Any:
        """Run the step on a whole batch."""
        interrupts.check()
        if any([o.is_past(self._model, self._method) for o in self._observers]):
            return self._model.get_metrics_result()
        say(self._model, self._backend, self._settings.options.accumulate)
        begin, clock = time.perf_counter(), time.time()
        with running(), keras_compat.tracing.applied_by(self._apply):
            outputs = self._step(data)
        if self._ended is not None:
            self._ended()
        number, self._number = self._number, self._number + 1
        line = None
        if self._settings.reports:
            rows = count_rows(first_leaf(data))
            loss, now = report.loss([], outputs), time.time()
            line = report.line(loss, rows, (clock, now))
        done = time.perf_counter()
        step = Step(number, begin, begin, done, data, outputs, line)
        for observer in self._observers:
            observer.after_step(self._model, self._method, step)
        return outputs

    def _apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Any
    ) -> Any:
        """Apply rank 0's gradients: GPUs may add up in different orders."""
        if self._backend.size > 1 and tf.config.list_logical_devices("GPU"):
            gradients = gradients_of_rank_zero(self._backend, gradients)
        return optimizer.apply(gradients, variables)
