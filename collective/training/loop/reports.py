"""The reports of the steps of Keras' own ``fit``, with the metrics after the last one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.training import keras_compat
from collective.training.steps import report


class Reports:
    """The reports of an epoch so far; see ``collective.training.steps.report``.

    They are converted only when they are read, so ``add`` never waits for a step. A model
    may have its metrics only when its first step is traced.

    Args:
        last: The last report before an epoch continues in its middle.

    Attributes:
        returned: What the last step returned.
    """

    def __init__(self, model: keras.Model, last: np.ndarray | None = None):
        self._model = model
        self._read: list[np.ndarray] = []
        self._waiting: list[tf.Tensor] = []
        self._before = np.zeros(report.SIZE) if last is None else np.array(last)
        self.returned: Any = None

    def add(self, one: tf.Tensor | None) -> None:
        """Add the report of a step, if steps have one."""
        if one is not None:
            self._waiting.append(one)

    def read(self) -> list[np.ndarray]:
        """Return the added reports, in order: float64 ``[report.SIZE]``."""
        self._read += [one.numpy()[: report.SIZE].copy() for one in self._waiting]
        self._waiting.clear()
        return self._read

    def last(self) -> np.ndarray:
        """Return the last report, with the metrics and what was returned now: float64."""
        read = self.read()
        return np.concatenate([read[-1], *self._values()]) if read else self._before

    def logs(self) -> dict[str, Any]:
        """Return what the last step returned, as numbers."""
        found: dict[str, Any] = keras_compat.data.as_numbers(self.returned)
        return found

    def restore_metrics(self) -> None:
        """Give the metrics the values of the last report, if there is one."""
        last = self.last()
        if not last[report.ROWS]:
            return
        metrics = self._model.metrics_variables
        shapes = [tuple(variable.shape) for variable in metrics]
        values = _cut(last[report.SIZE :], shapes)
        for variable, value in zip(metrics, values, strict=True):
            variable.assign(np.asarray(value))

    def _values(self) -> list[np.ndarray]:
        metrics = map(keras_compat.model.tf_variable, self._model.metrics_variables)
        found = [np.asarray(variable.read_value()) for variable in metrics]
        if isinstance(self.returned, Mapping):
            found += map(np.asarray, report.flat_logs(self.returned).values())
        return [np.ravel(value).astype(np.float64) for value in found]


def _cut(flat: np.ndarray, shapes: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
    """Cut a vector into consecutive arrays of these shapes."""
    start = 0
    for shape in shapes:
        stop = start + math.prod(shape)
        yield flat[start:stop].reshape(shape)
        start = stop
