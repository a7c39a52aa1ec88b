"""Metrics begin each epoch at zero, as in Keras' ``fit``."""

from __future__ import annotations

from collective.training.custom_step.layout import CustomLayout
from collective.training.observer import Observer
from collective.training.position import Position


class MetricEpochs(Observer):
    """Resets the metrics' variables, which have the totals of the epoch so far.

    Args:
        position: Of the training, with the ``layout`` of a ``CustomStep``.
    """

    def __init__(self, position: Position):
        self.position = position

    def begin_epoch(self, epoch: int, first: int, last: int) -> None:
        """Zero, or the totals with which the training was interrupted."""
        position, layout = self.position, self.position.layout
        position.model.reset_metrics()
        start = position.start
        if start is None or not start.within_epoch:
            return
        assert isinstance(layout, CustomLayout)
        values = layout.metric_values(start.sums)
        for variable, value in zip(layout.variables, values, strict=True):
            variable.assign(value)
