"""What ranks tell each other between steps: one leaves, somebody waits to come in.

Or the launcher has asked one of them for the job's next round.

A number for each replica rides in the step's all-reduce, in places of its own, so all
ranks know it at the end of the same step, and no message is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.elastic.preemption import LEAVES, RENEWS, WAITING, Preemption
from collective.training.attachments import Attachment, ReplicaStep, Total


@dataclass(frozen=True)
class News:
    """What all ranks have heard in a step.

    Attributes:
        leaving: Ranks that leave at its end.
        waiting: Whether somebody waits to come in.
        renews: Whether all end for the next round.
    """

    leaving: Sequence[int]
    waiting: bool
    renews: bool


class Notices(Attachment):
    """What this rank tells, and hears.

    Args:
        backend: One whose ranks may come and go.

    Attributes:
        preemption: Whether this rank was told to end.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.preemption = Preemption()
        self._heard = np.zeros(0, np.int64)
        with tf.device("CPU"):
            self._mine = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._now = 0

    def prepare(self) -> None:
        """Before a step: what this rank will tell in it."""
        now = self.preemption.news()
        if now != self._now:
            self._now = now
            self._mine.assign(now)

    def contribution(self, step: ReplicaStep) -> list[tf.Tensor]:
        """Inside ``run``: what of this replica rides in the all-reduce.

        Returns:
            A vector of ``most_replicas`` numbers, each exact even in bfloat16.
        """
        mine = tf.cast(self._mine.read_value(), tf.float32)
        return [tf.one_hot(self.backend.replica(), self.backend.most_replicas) * mine]

    def receive(self, total: Total, number: int) -> None:
        """After a step: the sum of all contributions."""
        self._heard = np.rint(total.numpy()).astype(np.int64)

    @property
    def news(self) -> News:
        """What was heard in the last step."""
        leaving = np.flatnonzero(self._heard & LEAVES).tolist()
        waiting, renews = (bool((self._heard & n).any()) for n in (WAITING, RENEWS))
        return News(leaving, waiting, renews)
