"""The report of a step: one small vector of float64, and its layout.

One vector is cheap to keep for every step. It is turned into named values only when they
are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class Layout:
    """Layout of a report: loss, rows, times, metrics' variables, and returned values.

    The metrics' variables have their values after the step; an epoch that continues in
    the middle begins with them.

    Args:
        returned: The shape of each value that the step returns, by name.
    """

    LOSS, ROWS, REDUCE_START, REDUCE_STOP = range(4)
    FIXED = 4

    def __init__(self, model: keras.Model, returned: Mapping[str, Sequence[int]]):
        self.model = model
        self.variables = list(model.metrics_variables)
        self._metric_shapes = [tuple(v.shape) for v in self.variables]
        self.describe(returned)

    def describe(self, returned: Mapping[str, Sequence[int]]) -> None:
        """Note the shapes of the values that the step returns."""
        self.names = list(returned)
        self._shapes = [tuple(shape) for shape in returned.values()]
        shapes = [*self._metric_shapes, *self._shapes]
        #: How many numbers come before the attachments.
        self.size = self.FIXED + sum(map(math.prod, shapes))

    def pack(
        self, fixed: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Return a report, inside of the graph: a vector of float64.

        Args:
            fixed: The loss, the rows, and the times at which the exchange began and ended.
            values: The metrics' variables, the step's returned values, the attachments.
        """
        flat = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in [*fixed, *values]]
        return tf.concat(flat, axis=0)

    def begin_epoch(self, last: np.ndarray | None = None) -> None:
        """Set metrics to zero, as Keras' ``fit`` does, or to their values in a report."""
        self.model.reset_metrics()
        if last is not None and last[self.ROWS]:
            self.restore(last)

    def reports(self, last: np.ndarray | None = None) -> Reports:
        """Return the reports of an epoch that begins, or continues after a last one."""
        return Reports(self, last)

    def restore(self, report: np.ndarray) -> None:
        """Give the metrics the values that they have in a report."""
        values = _cut(report[self.FIXED :], self._metric_shapes)
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(np.asarray(value))

    def logs(self, report: np.ndarray) -> dict[str, Any]:
        """Return the logs that Keras shows after this step."""
        values = _cut(report[self.FIXED :], [*self._metric_shapes, *self._shapes])
        return self.shown(
            dict(zip(self.names, values[len(self.variables) :], strict=True))
        )

    def shown(self, returned: Mapping[str, Any]) -> dict[str, Any]:
        """Return the logs that Keras shows for these returned values: they, or metrics."""
        results = self.model.get_metrics_result()
        chosen = results if set(results) == set(returned) else returned
        return {name: _number(value) for name, value in chosen.items()}


class Reports:
    """The reports of an epoch so far; the last one has its metrics.

    They are converted only when they are read, so ``add`` never waits for a step.

    Args:
        last: The report of the last step before a resumed epoch continues.
    """

    def __init__(self, layout: Layout, last: np.ndarray | None = None):
        self.layout = layout
        self._read: list[np.ndarray] = []
        self._waiting: list[tf.Tensor] = []
        self._before = np.zeros(layout.size) if last is None else np.array(last)

    def add(self, report: tf.Tensor) -> None:
        """Add the report of a step."""
        self._waiting.append(report)

    def read(self) -> list[np.ndarray]:
        """Return the added reports, in order, without attachments."""
        self._read += [r.numpy()[: self.layout.size].copy() for r in self._waiting]
        self._waiting.clear()
        return self._read

    def last(self) -> np.ndarray:
        """Return the last report: float64 ``[layout.size]``; zeros before the first step."""
        read = self.read()
        return read[-1] if read else self._before

    def logs(self) -> dict[str, Any]:
        """Return the logs that Keras shows of the epoch so far."""
        return self.layout.logs(self.last())


def flat_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return returned values by name, as Keras shows them, with inner dicts dissolved.

    A metric's result may be a dict. For all compiled metrics it is one, as in
    ``{m.name: m.result() for m in self.metrics}``.
    """
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found |= flat_logs(value) if isinstance(value, Mapping) else {name: value}
    return found


def _cut(flat: np.ndarray, shapes: Iterable[Sequence[int]]) -> list[np.ndarray]:
    """Cut a vector into consecutive arrays of these shapes."""
    arrays, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape)
        arrays.append(flat[start:stop].reshape(shape))
        start = stop
    return arrays


def _number(value: Any) -> float | Any:
    """Return a scalar as a number; leave several values as Keras gives them."""
    return float(value) if len(getattr(value, "shape", ())) == 0 else value
