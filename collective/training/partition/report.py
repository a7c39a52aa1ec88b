"""What a partitioned step reports: one vector, and what Keras would show of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.training import keras_compat
from collective.training.step.report import Layout, cut


class ReturnedLayout(Layout):
    """Layout of a report: loss, rows, times, metrics' variables, what the step returned.

    The metrics' variables have their values after the step; an epoch that continues in
    the middle begins with them.

    Args:
        returned: The shape of each value that the step returns, by name.
    """

    def __init__(self, model: keras.Model, returned: Mapping[str, Sequence[int]]):
        self.model = model
        self.outputs = []
        self.gathered_metrics = True
        self.variables = list(model.metrics_variables)
        self.metric_shapes = [tuple(v.shape) for v in self.variables]
        self.describe(returned)

    def describe(self, returned: Mapping[str, Sequence[int]]) -> None:
        """Has values of these shapes returned."""
        self.names = list(returned)
        self.shapes = [tuple(shape) for shape in returned.values()]
        shapes = [*self.metric_shapes, *self.shapes]
        self.size = self.FIXED + sum(map(math.prod, shapes))

    def pack_returned(
        self, fixed: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """A report, inside of the graph: a vector of float64.

        Args:
            fixed: The loss, the rows, and when the exchange began and ended.
            values: The metrics' variables, what the step returned, attachments.
        """
        flat = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in [*fixed, *values]]
        return tf.concat(flat, axis=0)

    def restore(self, sums: np.ndarray) -> None:
        """Gives the metrics the values that they have in a sum of reports."""
        values = cut(sums[self.FIXED :], self.metric_shapes)
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(np.asarray(value))

    def adopted(self, sums: np.ndarray) -> np.ndarray:
        """As ``Layout.adopted``, of the sums of a step of parts."""
        parts = Layout(self.model)
        outputs, state = len(parts.outputs), parts.metric_shapes
        rows, steps = sums[self.ROWS], sums[self.STEPS]
        totals = sums[self.FIXED :][:outputs]
        found: dict[int, Any] = {}
        for metric, total in zip(
            keras_compat.loss_trackers(self.model), totals, strict=True
        ):
            found |= _mean(metric, total, steps)
        tracker = getattr(self.model, "_loss_tracker", None)
        if tracker is not None:
            found |= _mean(tracker, sums[self.LOSS], rows)
        kept = [v for m in keras_compat.metrics(self.model) for v in m.variables]
        values = cut(sums[self.FIXED + outputs :], state)
        found |= {id(v): value for v, value in zip(kept, values, strict=True)}
        flat = [np.ravel(found[id(v)]) for v in self.variables]
        returned = np.zeros(sum(map(math.prod, self.shapes)))
        return np.concatenate([sums[: self.FIXED], *flat, returned])

    def write(self, sums: np.ndarray) -> None:
        """Nothing: the step itself updates the metrics."""

    def logs(self, sums: np.ndarray, reports: Sequence[np.ndarray]) -> dict[str, Any]:
        """What Keras shows after these steps: its metrics, or what the last returned."""
        values = cut(sums[self.FIXED :], [*self.metric_shapes, *self.shapes])
        returned = dict(zip(self.names, values[len(self.variables) :], strict=True))
        return self.shown(returned)

    def shown(self, returned: Mapping[str, Any]) -> dict[str, Any]:
        """What Keras shows where the last step has returned this."""
        results = self.model.get_metrics_result()
        chosen = results if set(results) == set(returned) else returned
        return {name: _number(value) for name, value in chosen.items()}


def _mean(metric: Any, total: float, count: float) -> dict[int, float]:
    """The values of the variables of a mean, by their ids."""
    return {id(metric.total): total, id(metric.count): count}


def _number(value: Any) -> Any:
    """A scalar as a number; what has several values stays as Keras gives it."""
    return float(value) if len(getattr(value, "shape", ())) == 0 else value
