"""Further values that travel in a step's all-reduce with gradients, losses and metrics.

An attachment sends numbers of each replica to every rank. Its tensors are appended to the
step's own, so that no message is added, and every rank has the totals of the same steps. A
step takes a list of attachments and knows nothing else about them:

    prepare()           outside the graph, before each step
    contribution(step)  inside the graph: this replica's tensors
    receive(total, n)   outside the graph, after step n: their sum over all replicas
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class ReplicaStep(NamedTuple):
    """A step of one replica, as its attachments see it inside the graph."""

    number: tf.Tensor  # int64 scalar, the step's number from 0
    replica: tf.Tensor  # int64 scalar, the replica's number in the job
    rows_read: Any  # of this replica, as ``Batch.rows_read``; ``()`` if there are none


@dataclass(frozen=True)
class Total:
    """The sum of an attachment's contributions: a part of a step's report."""

    report: Any  # see ``TrainingStep.__call__``
    start: int
    stop: int

    def numpy(self) -> np.ndarray:
        """Wait for the step, and return all tensors of the contribution, flat, in float64."""
        return self.report.numpy()[self.start : self.stop]


class Attachment(ABC):
    """Tensors of each replica that are summed with the gradients.

    The sum may be in float32, or travel as bfloat16 (integers up to 256 are exact in
    both). For numbers of each single replica, a contribution is zero in all rows but
    its own (``one_hot(replica, most_replicas)``).
    """

    def prepare(self) -> None:
        """Prepare for a step; called outside the graph."""

    @abstractmethod
    def contribution(self, step: ReplicaStep) -> list[tf.Tensor]:
        """Return this replica's tensors, of static shapes; called in ``Backend.run``."""

    def continues(self, before: Attachment) -> bool:
        """Return whether the graph of an earlier training's attachment serves this one.

        If so, take over the variables that the graph reads.
        """
        return False

    @abstractmethod
    def receive(self, total: Total, number: int) -> None:
        """Receive the total of step ``number``, on every rank, outside the graph.

        Raises:
            CollectiveError: The total shows that training must not continue.
        """


class Attachments(list[Attachment]):
    """All attachments of a step, in order."""

    def __init__(self, attachments: Iterable[Attachment] = ()):
        super().__init__(attachments)
        self._sizes: list[int] = []

    def continued_by(self, others: Sequence[Attachment]) -> Attachments | None:
        """Return ``others`` for the graph of these, or None if they need another graph."""
        if len(others) != len(self):
            return None
        pairs = zip(others, self, strict=True)
        if not all(type(a) is type(b) and a.continues(b) for a, b in pairs):
            return None
        found = Attachments(others)
        found._sizes = self._sizes
        return found

    def prepare(self) -> None:
        """Prepare all for a step; called outside the graph."""
        for attachment in self:
            attachment.prepare()

    def contributions(self, step: ReplicaStep) -> list[list[tf.Tensor]]:
        """Return the tensors of each; called in ``Backend.run``."""
        return [attachment.contribution(step) for attachment in self]

    def flat(self, totals: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """Return the sums of ``contributions``, for the report; called in ``Backend.run``."""
        self._sizes = [sum(t.shape.num_elements() for t in one) for one in totals]
        return tf.nest.flatten(totals)

    def receive(self, report: Any, start: int, number: int) -> None:
        """Give each its part of the report of step ``number``, from ``start`` on."""
        for attachment, size in zip(self, self._sizes, strict=True):
            attachment.receive(Total(report, start, start + size), number)
            start += size
