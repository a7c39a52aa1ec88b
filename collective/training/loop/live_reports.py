"""The reports of the steps of Keras' own ``fit``: metrics are read from their variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.training import keras_compat
from collective.training.step.report_layout import Layout, Reports, flat_logs


class LiveLayout(Layout):
    """The layout of ``collective.training.steps.report``, with the metrics after it.

    A model may have its metrics only when its first step is traced.

    Attributes:
        returned: What the last step returned.
    """

    def __init__(self, model: keras.Model):
        super().__init__(model, {})
        self.size = self.FIXED  # of what a step reports
        self.returned: Any = None

    def reports(self, last: np.ndarray | None = None) -> Reports:
        """Return the reports of an epoch that begins."""
        return LiveReports(self, last)

    def restore_metrics(self, report: np.ndarray) -> None:
        """Give the metrics the values of a report, if it is that of a step."""
        if report[self.ROWS]:
            Layout(self.model, {}).restore(report)

    def values(self) -> list[np.ndarray]:
        """Return the metrics' variables and what was returned, flat, as float64."""
        metrics = map(keras_compat.model.tf_variable, self.model.metrics_variables)
        found = [np.asarray(variable.read_value()) for variable in metrics]
        if isinstance(self.returned, Mapping):
            found += map(np.asarray, flat_logs(self.returned).values())
        return [np.ravel(value).astype(np.float64) for value in found]


class LiveReports(Reports):
    """The reports of an epoch so far: of each step, the numbers that come first."""

    layout: LiveLayout

    def add(self, report: tf.Tensor | None) -> None:
        """Add the report of a step, if steps have one."""
        if report is not None:
            super().add(report)

    def last(self) -> np.ndarray:
        """Return the last report, with the metrics as they are now."""
        read = self.read()
        if not read:
            return self._before
        return np.concatenate([read[-1], *self.layout.values()])

    def logs(self) -> dict[str, Any]:
        """Return what the last step returned, as numbers."""
        found: dict[str, Any] = keras_compat.data.as_numbers(self.layout.returned)
        return found
