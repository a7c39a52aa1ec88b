"""Says where a loss is not finite, once; the training goes on, as in Keras."""

from __future__ import annotations

import numpy as np

from collective.log import log
from collective.training.loop.observer import Observer
from collective.training.loop.position import Position


class FiniteWarning(Observer):
    """Looks at the losses of an epoch when it has ended: no step waits for it."""

    def __init__(self, position: Position):
        self._position = position
        self._is_noted = False

    def end_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Names the first step whose loss is not finite."""
        averages = self._position.averages
        if self._is_noted or averages is None or self._position.backend.rank:
            return
        losses = [report[averages.layout.LOSS] for report in averages.reports]
        bad = np.flatnonzero(~np.isfinite(losses))
        if not len(bad):
            return
        self._is_noted = True
        log.warning(
            "step %d: the loss is not finite (%s); the training goes on, as in Keras. "
            'HINT: on_nan="raise" ends it in that step, and names rank and variable; '
            "keras.callbacks.TerminateOnNaN() after it",
            *(self._position.step - len(losses) + int(bad[0]), losses[bad[0]]),
        )
