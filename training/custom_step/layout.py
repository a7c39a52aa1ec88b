"""The report of a user's own step, and the logs that are made of it.

As Keras' ``fit``: where the names that the step returns are those of the model's
metrics, an epoch has the metrics' results; else it has what the last step returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from collective.training import keras_compat
from collective.training.reporting.report import Layout


class CustomLayout(Layout):
    """Layout of a report: loss, rows, times, changes of metrics, logs, attachments.

    Args:
        returned: The shape of each value that the step returns, by name.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Sequence[keras.Variable],
        returned: Mapping[str, tuple[int, ...]],
    ):
        self.model = model
        self.variables = list(variables)
        self.outputs = []
        self.gathered_metrics = False
        self.names = list(returned)
        self.shapes = list(returned.values())
        self.metric_shapes = [tuple(v.shape) for v in variables]
        sizes = [int(np.prod(s)) for s in [*self.metric_shapes, *self.shapes]]
        self.size = self.FIXED + sum(sizes)

    def metric_values(self, sums: np.ndarray) -> list[np.ndarray]:
        """The changes of the metrics' variables in a report, or in a sum of reports."""
        return self._cut(sums[self.FIXED :], self.metric_shapes)

    def logs(self, sums: np.ndarray, reports: Sequence[np.ndarray]) -> dict[str, Any]:
        """What Keras would show after these steps."""
        results = keras_compat.all_results(
            self.model, self.variables, self.metric_values(sums)
        )
        if set(results) == set(self.names):
            return results
        if not reports:  # resumed behind the last step
            return {}
        last = self.returned(reports[-1])
        return {name: float(v) if v.ndim == 0 else v for name, v in last.items()}

    def returned(self, report: np.ndarray) -> dict[str, np.ndarray]:
        """What the step of a report returned."""
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        start = self.size - sum(sizes)
        values = self._cut(report[start : self.size], self.shapes)
        return dict(zip(self.names, values, strict=True))

    @staticmethod
    def _cut(flat: np.ndarray, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        pieces = []
        for shape in shapes:
            size = int(np.prod(shape))
            pieces.append(flat[:size].reshape(shape))
            flat = flat[size:]
        return pieces
