"""The rows that go into one replica's step."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.input.leaves import count_rows, first_leaf, slice_rows
from collective.training.input.pipeline import Batch
from collective.training.input.plan import share
from collective.training.step.rows import BatchRows


class ReplicaRows(NamedTuple):
    """The rows of one replica."""

    rows: BatchRows  # the rows; there may be none
    count: tf.Tensor  # int64 scalar, their number
    rows_read: Any  # as ``Batch.rows_read``, for these rows; ``()`` if it is absent
    first: tf.Tensor  # int64 scalar, the place of the first row in the global batch


def replica_rows(backend: Backend, batch: Batch, replica: tf.Tensor) -> ReplicaRows:
    """Cut the rows of a replica (int64 scalar) out of its process' batch, ``without_none``."""
    total = tf.cast(backend.replica_count(), tf.int64)
    start, stop = share(batch.global_rows, replica, total)
    if len(backend.local_replicas) == 1:
        return process_rows(batch, start)
    rows = BatchRows(batch.x, batch.y, batch.sample_weight)
    first, _ = share(batch.global_rows, backend.local_replicas[0], total)
    rows, rows_read = slice_rows((rows, batch.rows_read), start - first, stop - first)
    return ReplicaRows(rows, stop - start, rows_read, start)


def process_rows(batch: Batch, first: Any) -> ReplicaRows:
    """Return all rows of a process; the batch is ``without_none``."""
    rows = BatchRows(batch.x, batch.y, batch.sample_weight)
    count = count_rows(first_leaf(batch.x))
    return ReplicaRows(rows, count, batch.rows_read, tf.cast(first, tf.int64))
