"""Messages between ranks, announced within the step's own all-reduce.

A rank leaves, a process waits to join, or the launcher asks for the job's next
generation. Each replica adds a number in a place of its own, so every rank knows all of
them at the end of the same step, and this needs no further message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.elastic.preemption import LEAVES, RESTARTS, WAITING, Preemption
from collective.training.step.attachments import Attachment, ReplicaStep, Total


class ControlMessages(Attachment):
    """Sends and receives the control messages of this rank.

    Attributes:
        preemption: Whether this rank was asked to end (SIGTERM).
        leaving: Ranks that leave at the end of the last step; all ranks know them.
        waiting: Whether a process waits to join.
        next_generation: Whether all end for the job's next generation.
    """

    leaving: Sequence[int] = ()
    waiting = next_generation = False

    def __init__(self, backend: Backend):
        self.backend = backend
        self.preemption = Preemption()
        with tf.device("CPU"):
            self._mine = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._current = 0

    def continues(self, before: Attachment) -> bool:
        """Take over the variable that the graph of an earlier training reads."""
        assert isinstance(before, ControlMessages)
        self._mine, self._current = before._mine, before._current
        return self.backend is before.backend

    def prepare(self) -> None:
        """Set the number that this rank sends in the next step."""
        current = self.preemption.flags()
        if current != self._current:
            self._current = current
            self._mine.assign(current)

    def contribution(self, step: ReplicaStep) -> list[tf.Tensor]:
        """Return ``most_replicas`` numbers, exact even in bfloat16; called in ``run``."""
        mine = tf.cast(self._mine.read_value(), tf.float32)
        return [tf.one_hot(self.backend.replica(), self.backend.most_replicas) * mine]

    def receive(self, total: Total, number: int) -> None:
        """Read the sum of all contributions after a step."""
        flags = np.rint(total.numpy()).astype(np.int64)
        self.leaving = np.flatnonzero(flags & LEAVES).tolist()
        self.waiting = bool((flags & WAITING).any())
        self.next_generation = bool((flags & RESTARTS).any())
