"""All-reduce of ``tf.IndexedSlices``: rows are gathered, and equal rows combined."""

from __future__ import annotations

import tensorflow as tf

from collective import tensorflow_ops
from collective.operations.kinds import Average, Op, Sum
from collective.tensorflow import dtypes
from collective.tensorflow.process_sets import ProcessSet, group_of
from collective.tensorflow.reductions import Reduction
from collective.tensorflow_ops import ranks


def allreduce(
    slices: tf.IndexedSlices,
    op: Reduction,
    factor: float,
    process_set: ProcessSet,
    name: str | None = None,
) -> tf.IndexedSlices:
    """Sums or averages slices over the ranks.

    Args:
        slices: ``values [rows, ...]`` and ``indices [rows]``; any number of rows.
        op: Sum or Average.
        factor: What the result is multiplied with.
        process_set: The ranks that take part.
        name: Of the call.

    Returns:
        Each row once, in ascending order. The average of integers is in float32 or
        float64.

    Raises:
        NotImplementedError: For another reduction.
        tf.errors.OpError: If ranks do not agree on dtype or shape.
    """
    if not isinstance(op, Op) or op not in (Sum, Average):
        raise NotImplementedError(
            f"{op.name} of sparse tensors: only Sum and Average are of their rows\n"
            "HINT: pass sparse_as_dense=True, or tf.convert_to_tensor(...)"
        )
    group = group_of(process_set)
    values = tensorflow_ops.allgather(slices.values, name and f"{name} rows", group)
    indices = tensorflow_ops.allgather(
        slices.indices, name and f"{name} indices", group
    )
    if op == Average:  # of integers: floats, as Horovod's, which TensorFlow's "/" makes
        values = values / tf.cast(ranks.size(group), values.dtype)
    total = combined(tf.IndexedSlices(values, indices, slices.dense_shape))
    values = dtypes.scaled(total.values, factor)
    return tf.IndexedSlices(values, total.indices, total.dense_shape)


def combined(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same tensor with each row once.

    Optimizers square the values of sparse gradients: of a row that comes twice, they
    would make the sum of the squares and not the square of the sum.
    """
    rows, places = tf.unique(slices.indices)
    order = tf.argsort(rows, stable=True)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
    return tf.IndexedSlices(
        tf.gather(values, order), tf.gather(rows, order), slices.dense_shape
    )
