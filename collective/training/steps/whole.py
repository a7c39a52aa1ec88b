"""The step of a model that runs eagerly: whole, on every rank.

``run_eagerly=True`` leaves no graph that could be partitioned. Every rank has the whole
batch, and the same random numbers, so each computes what one process computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.training import interrupts, keras_compat
from collective.training.keras_compat.batch_functions import Step
from collective.training.steps.batch_function import running
from collective.training.whole_step import gradients_of_rank_zero, say


class WholeStep:
    """A step of Keras on whole batches, for Keras' own function.

    Args:
        step: A method of the model.
        accumulate: In how many pieces a batch should be computed; it cannot be.
        ended: Called after each step, or None.
    """

    def __init__(
        self,
        model: keras.Model,
        step: Step,
        backend: Backend,
        accumulate: int,
        ended: Callable[[], None] | None = None,
    ):
        self._ended = ended
        self._model, self._step, self._backend = model, step, backend
        self._accumulate = accumulate

    def __call__(self, data: Any) -> Any:
        """Run the step on a whole batch."""
        interrupts.check()
        say(self._model, self._backend, self._accumulate)
        with running(), keras_compat.tracing.applied_by(self._apply):
            outputs = self._step(data)
        if self._ended is not None:
            self._ended()
        return outputs

    def _apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Any
    ) -> Any:
        """Apply rank 0's gradients: GPUs may add up in different orders."""
        if self._backend.size > 1 and tf.config.list_logical_devices("GPU"):
            gradients = gradients_of_rank_zero(self._backend, gradients)
        return optimizer.apply(gradients, variables)
