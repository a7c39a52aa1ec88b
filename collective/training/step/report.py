"""The report of a step: one small vector of float64, and its layout.

One vector is cheap to keep for every step and to add up over an epoch. It is turned into
named values only when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.training import keras_compat


def cut(flat: np.ndarray, shapes: Iterable[Sequence[int]]) -> list[np.ndarray]:
    """The arrays of these shapes that lie one after the other in a vector."""
    arrays, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape)
        arrays.append(flat[start:stop].reshape(shape))
        start = stop
    return arrays


class Layout:
    """Layout of a report: loss, rows, times, losses of outputs, metrics, attachments.

    With ``gathered_metrics``, metrics' variables continue from step to step, and a report
    has their values; otherwise it has what a step adds to them.
    """

    LOSS, ROWS, REDUCE_START, REDUCE_STOP = range(4)
    FIXED = 4
    #: In the sums over steps: how many steps, in place of what a sum of times would be.
    STEPS = REDUCE_START

    def __init__(self, model: keras.Model, gathered_metrics: bool = False):
        self.model = model
        self.gathered_metrics = gathered_metrics
        self.outputs = [m.name for m in keras_compat.loss_trackers(model)]
        self.metric_shapes = [
            tuple(v.shape) for m in keras_compat.metrics(model) for v in m.variables
        ]
        metrics = sum(map(math.prod, self.metric_shapes))
        #: Numbers before those of the attachments.
        self.size = self.FIXED + len(self.outputs) + metrics

    def pack(
        self,
        loss: tf.Tensor,
        rows: tf.Tensor,
        reduce_span: tuple[Any, Any],
        outputs: Sequence[tf.Tensor],
        metrics: Sequence[tf.Tensor],
        more: Sequence[tf.Tensor] = (),
    ) -> tf.Tensor:
        """Packs a report, inside the graph: a vector of float64."""
        fixed = [loss, rows, *reduce_span, *outputs]
        vector = tf.stack([tf.cast(value, tf.float64) for value in fixed])
        rest = [*metrics, *more]
        flat = [tf.reshape(tf.cast(m, tf.float64), [-1]) for m in rest]
        return tf.concat([vector, *flat], axis=0)

    def logs(self, sums: np.ndarray, reports: Sequence[np.ndarray]) -> dict[str, Any]:
        """Averages over some steps, under Keras' names.

        Args:
            sums: ``Averages.sums()``.
            reports: The reports behind them, as far as they are known.
        """
        rows = sums[self.ROWS]
        logs = {"loss": float(sums[self.LOSS] / rows)}
        for place, name in enumerate(self.outputs, self.FIXED):
            # Keras' mean over batches, however many rows they have.
            logs[name] = float(sums[place] / sums[self.STEPS])
        state = cut(sums[self.FIXED + len(self.outputs) :], self.metric_shapes)
        return logs | keras_compat.metric_results(self.model, state)

    def adopted(self, sums: np.ndarray) -> np.ndarray:
        """The sums of a step that keeps others of an epoch, as this one keeps them.

        Args:
            sums: Those of ``ReturnedLayout``.
        """
        values = cut(
            sums[self.FIXED :], [tuple(v.shape) for v in self.model.metrics_variables]
        )
        variables = self.model.metrics_variables
        by_id = {id(v): value for v, value in zip(variables, values, strict=True)}
        trackers = keras_compat.loss_trackers(self.model)
        outputs = [by_id[id(m.variables[0])].ravel() for m in trackers]
        kept = [v for m in keras_compat.metrics(self.model) for v in m.variables]
        state = [by_id[id(v)].ravel() for v in kept]
        return np.concatenate([sums[: self.FIXED], *outputs, *state])

    def write(self, sums: np.ndarray) -> None:
        """Gives the model's metrics their values after some steps."""
        rows = max(float(sums[self.ROWS]), 1.0)
        state = cut(sums[self.FIXED + len(self.outputs) :], self.metric_shapes)
        keras_compat.write_metrics(self.model, state, sums[self.LOSS] / rows, rows)


class Averages:
    """Averages over an epoch so far: the loss by rows, those of outputs by batches.

    Reports are converted only when they are read, so ``add`` never waits for a step.
    ``sums`` are those of the epoch's earlier steps, of a resumed epoch.
    """

    def __init__(self, layout: Layout, sums: np.ndarray | None = None):
        self.layout = layout
        self._reports: list[np.ndarray] = []
        self._waiting: list[tf.Tensor] = []
        self._sum = np.zeros(layout.size) if sums is None else np.array(sums)
        if self._sum.shape != (layout.size,):
            self._sum = layout.adopted(self._sum)

    def add(self, report: tf.Tensor) -> None:
        """Adds the report of a step."""
        self._waiting.append(report)

    @property
    def reports(self) -> list[np.ndarray]:
        """The added reports, in order."""
        self.sums()
        return self._reports

    def sums(self) -> np.ndarray:
        """Returns the sums behind the averages: float64 ``[layout.size]``, not a copy."""
        layout = self.layout
        metrics = layout.FIXED + len(layout.outputs)
        for report in self._waiting:
            values = report.numpy()[: layout.size].copy()
            self._reports.append(values)
            weighted = values * np.float64(values[layout.ROWS])
            weighted[layout.ROWS] = values[layout.ROWS]
            weighted[layout.STEPS] = 1
            weighted[layout.FIXED :] = values[layout.FIXED :]
            if layout.gathered_metrics:
                self._sum[metrics:] = 0
            self._sum += weighted
        self._waiting.clear()
        return self._sum

    def write(self) -> None:
        """Gives the model's metrics their values so far, as Keras' own step does."""
        self.layout.write(self.sums())

    def logs(self) -> dict[str, float]:
        """The averages so far under Keras' names: loss, losses of outputs, metrics."""
        return self.layout.logs(self.sums(), self._reports)
