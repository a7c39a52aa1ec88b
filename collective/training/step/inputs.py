"""What goes into one replica's step, as tensors: values of variables, and rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.input.leaves import count_rows, first_leaf
from collective.training.input.pipeline import Batch
from collective.training.input.plan import share
from collective.training.prepared import PreparedModel
from collective.training.step.accumulation import slice_rows
from collective.training.step.rows import Rows


class Weights(NamedTuple):
    """The values of a model's variables, as ``PreparedModel`` has them."""

    trainable: list[Any]
    state: list[Any]


class StepInputs(NamedTuple):
    """What the sums of one replica in one step depend on."""

    weights: Weights  # values of the model's variables
    rows: Rows  # the rows of this replica; there may be none
    count: Any  # int64 scalar, their number
    global_rows: Any  # int64 scalar, rows of the global batch
    # float32 scalar, the loss is multiplied by it before differentiation.
    loss_scale: Any
    number: Any  # int64 scalar, the step's number
    replica: Any  # int64 scalar, the replica's number in the job
    first_row: Any  # int64 scalar, the place of its first row in the global batch
    # float64 vector, the values from which metrics of the whole batch continue; empty
    # where there are none.
    metrics: Any

    def of_pass(
        self, rows: Rows, micro_batch: Any = 0, start: Any = None
    ) -> tuple[Any, ...]:
        """The arguments of ``Forward.train`` for some of the rows, from ``start`` on."""
        first = self.first_row
        if start is not None:
            first += tf.cast(start, tf.int64)
        place = [self.number, self.replica, tf.cast(micro_batch, tf.int64), first]
        return self.weights, rows, self.global_rows, self.loss_scale, tf.stack(place)


class ReplicaRows(NamedTuple):
    """The rows of one replica."""

    rows: Rows  # the rows; there may be none
    count: tf.Tensor  # int64 scalar, their number
    rows_read: Any  # as ``Batch.rows_read``, for these rows; ``()`` where it is absent
    first: tf.Tensor  # int64 scalar, the place of the first of them in the global batch


def read_weights(prepared: PreparedModel) -> Weights:
    """Reads the current values of the variables."""
    return Weights(
        [tf.convert_to_tensor(v) for v in prepared.trainable],
        [tf.convert_to_tensor(v) for v in prepared.state],
    )


def weight_specs(prepared: PreparedModel) -> Weights:
    """Shapes and dtypes of the values, as ``tf.TensorSpec``."""
    return Weights(
        [tf.TensorSpec(v.shape, v.dtype) for v in prepared.trainable],
        [tf.TensorSpec(v.shape, v.dtype) for v in prepared.state],
    )


def replica_rows(backend: Backend, batch: Batch, replica: tf.Tensor) -> ReplicaRows:
    """Cuts the rows of a replica (int64 scalar) out of its process', ``without_none``."""
    total = tf.cast(backend.replica_count(), tf.int64)
    start, stop = share(batch.global_rows, replica, total)
    if len(backend.local_replicas) == 1:
        return process_rows(batch, start)
    rows = Rows(batch.x, batch.y, batch.sample_weight)
    first, _ = share(batch.global_rows, backend.local_replicas[0], total)
    rows, rows_read = slice_rows((rows, batch.rows_read), start - first, stop - first)
    return ReplicaRows(rows, stop - start, rows_read, start)


def process_rows(batch: Batch, first: Any) -> ReplicaRows:
    """All rows of a process; the batch is ``without_none``."""
    rows = Rows(batch.x, batch.y, batch.sample_weight)
    count = count_rows(first_leaf(batch.x))
    return ReplicaRows(rows, count, batch.rows_read, tf.cast(first, tf.int64))
