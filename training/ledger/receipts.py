"""What each replica has read, sent to rank 0 in the step's own all-reduce.

A ledger must say which rows were *read*, and only their reader knows. So each replica
puts the places of its rows in the global batch and a checksum of their numbers into one
row of a small matrix, which the all-reduce of the gradients sums with the rest. A step
that some rank did not finish leaves no receipt, and no message is added.

The sum may be of float32, or sent as bfloat16, so numbers are sent byte by byte:
integers up to 255 are exact in all of these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.training.ledger.writer import PRIME
from collective.training.replica.attachments import Attachment, ReplicaStep, Total

BYTES = 4
SIZE = 3 * BYTES


class Receipt(NamedTuple):
    """What one replica has read in one step.

    Attributes:
        start, stop: Places in the global batch, half-open.
        mark: ``collective.training.ledger.writer.mark`` of the row numbers.
    """

    start: int
    stop: int
    mark: int


class Receipts(Attachment):
    """Carries the receipts of all replicas to every rank.

    Args:
        backend: Knows the replicas.

    Attributes:
        last: Of the last step: all receipts, for ``read``; None before the first one.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        self.last: Total | None = None

    def contribution(self, step: ReplicaStep) -> list[tf.Tensor]:
        """Inside ``run``: this replica's receipt."""
        return [write(step.rows_read, step.replica, self.backend.most_replicas)]

    def receive(self, total: Total, number: int) -> None:
        """After a step: keeps its receipts."""
        self.last = total


def write(read: tf.Tensor, replica: Any, replicas: int) -> tf.Tensor:
    """This replica's receipt, in its row of the matrix of all; in the graph.

    Args:
        read: int64 ``[n, 2]``, place and row number of each row it has read.
        replica, replicas: Its number, and the number of replicas.

    Returns:
        float32 ``[replicas, SIZE]``, zero in all other rows.
    """
    places, numbers = read[:, 0], read[:, 1]
    some = tf.shape(places)[0] > 0
    start = tf.cond(some, lambda: places[0], lambda: tf.zeros([], tf.int64))
    stop = tf.cond(some, lambda: places[-1] + 1, lambda: tf.zeros([], tf.int64))
    prime = tf.constant(PRIME, tf.int64)
    # As in ``collective.training.ledger.writer.mark``; no product exceeds 2**62.
    base = (numbers % prime + 1) % prime
    mark = tf.reduce_sum(base * base % prime * base % prime) % prime
    powers = tf.constant([256**i for i in range(BYTES)], tf.int64)
    digits = tf.stack([start, stop, mark])[:, None] // powers % 256
    mine = tf.one_hot(tf.cast(replica, tf.int32), replicas)
    return mine[:, None] * tf.cast(tf.reshape(digits, [1, SIZE]), tf.float32)


def read(summed: np.ndarray) -> list[Receipt]:
    """The receipts of all replicas, from the summed matrix as a flat vector."""
    digits = np.rint(summed).astype(np.int64).reshape(-1, 3, BYTES)
    numbers = digits @ (256 ** np.arange(BYTES, dtype=np.int64))
    return [Receipt(*(int(n) for n in row)) for row in numbers]
