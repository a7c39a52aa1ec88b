"""What a training returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import keras

from collective.backends.base import Backend
from collective.training.reporting.timing import Timing

T = TypeVar("T")


@dataclass
class Result:
    """What ``collective.training.fit`` returns.

    Attributes:
        model: The trained model, the same on every rank.
        backend: The backend it ran on.
        history: Logs of each epoch by name, as in ``keras.callbacks.History``.
        losses: The loss of every step, over its whole global batch; includes the steps
            before the checkpoint that this training resumed from.
        timing: Seconds of every step that this process made.
    """

    model: keras.Model
    backend: Backend
    history: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)

    def afterwards(self, action: Callable[[], T]) -> T:
        """Runs what all ranks do together after the training, as an evaluation.

        In an elastic job, the remaining ranks repeat it when a rank dies meanwhile
        (``collective.training.elastic.membership``).

        Args:
            action: Uses collectives; every rank calls ``afterwards`` with the same one.

        Returns:
            What the action returned.
        """
        return action()
