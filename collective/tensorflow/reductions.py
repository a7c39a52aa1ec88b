"""The reduction that a call asks for, and reductions that the core does not have.

The core does not reduce sparse tensors and some dtypes, and it has no Adasum: a sum
that shrinks if gradients point the same way. For two gradients a and b it is a (1 - a·b
/ 2|a|²) + b (1 - a·b / 2|b|²): their sum if they are orthogonal, their mean if they are
equal. More gradients are combined in pairs, as in a tournament. From Maleki et al.,
"Scaling Distributed Training with Adaptive Summation" (2020).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

import tensorflow as tf

from collective import tensorflow_ops
from collective.operations.kinds import (
    DTYPES,
    Average,
    Max,
    Min,
    Op,
    Product,
    Sum,
)
from collective.tensorflow.process_sets import ProcessSet, group_of
from collective.tensorflow_ops import ranks
from collective.tensorflow_ops.repeated_rows import added_in_order


class _Adasum:
    """Adaptive summation, which is not a reduction of the core (see ``adasum``)."""

    name = "Adasum"

    def __repr__(self) -> str:
        return "Adasum"


Adasum: Final = _Adasum()
Reduction = Op | _Adasum

# Horovod's numbers of its operations, which scripts pass without conversion.
_BY_NUMBER: tuple[Reduction, ...] = (Average, Sum, Adasum, Min, Max, Product)

# Reduced in a dtype that can hold their sums, and cast back.
_WIDER = {tf.int16: tf.int32, tf.uint16: tf.int32, tf.uint32: tf.int64}

ODD = (
    "Running Adasum with non-power of 2 ranks is not supported yet.\n"
    "HINT: start 2, 4, 8, ... ranks, or use hvd.Average"
)


def chosen_reduction(
    op: Reduction | int | None = None, average: bool | None = None
) -> Reduction:
    """Return the reduction of a call.

    Args:
        op: Average (also for None), Sum, Adasum, Min, Max or Product; or Horovod's
            number of the operation.
        average: The old way to say Average or Sum.

    Raises:
        ValueError: If both are given, or ``op`` is not a reduction.
    """
    if average is not None:
        if op is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        warnings.warn(
            "Parameter `average` has been replaced with `op`",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    if op is None:
        return Average
    if type(op) is int and 0 <= op < len(_BY_NUMBER):
        return _BY_NUMBER[op]
    if not isinstance(op, Reduction):
        raise ValueError(
            f"op={op!r} is not a reduction\n"
            "HINT: hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product"
        )
    return op


def reducible(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor in a dtype that the core can reduce, if there is one."""
    return tf.cast(tensor, _WIDER.get(tensor.dtype, tensor.dtype))


def movable(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor, as bytes (``[..., n]``) if the core lacks its dtype."""
    known = tensor.dtype.base_dtype.name in DTYPES
    return tensor if known else tf.bitcast(tensor, tf.uint8)


def restored(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undo ``movable``, after a collective that does not look at values."""
    return tensor if tensor.dtype == dtype else tf.bitcast(tensor, dtype)


def scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Return the tensor times a factor; whole numbers are rounded towards zero.

    Half precision is multiplied in float32.
    """
    if isinstance(factor, int | float) and factor == 1:
        return tensor
    dtype = tensor.dtype
    if not dtype.is_floating and not dtype.is_complex:
        wide = tf.float64
    else:
        wide = tf.float32 if dtype.size == 2 else dtype
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), dtype)


def sparse_allreduce(
    slices: tf.IndexedSlices,
    op: Reduction,
    factor: float,
    process_set: ProcessSet,
    name: str | None = None,
) -> tf.IndexedSlices:
    """Sum or average slices: gather all rows, and combine equal ones.

    Args:
        slices: ``values [rows, ...]`` and ``indices [rows]``; any number of rows.
        op: Sum or Average; any other raises a NotImplementedError.
        factor: Multiplied into the result.
        process_set, name: As for ``hvd.allreduce``.

    Returns:
        Each row once, in ascending order. The average of integers is in float32 or
        float64.
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
    if op == Average:  # floats, as Horovod's "/" of integers
        values = values / tf.cast(ranks.size(group), values.dtype)
    total = combined_rows(tf.IndexedSlices(values, indices, slices.dense_shape))
    values = scaled(total.values, factor)
    return tf.IndexedSlices(values, total.indices, total.dense_shape)


def combined_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return the same tensor with each row once.

    Optimizers square the values of sparse gradients: for a row that occurs twice, they
    would compute the sum of the squares and not the square of the sum.
    """
    rows, places = tf.unique(slices.indices)
    order = tf.argsort(rows, stable=True)
    with added_in_order([slices]):
        values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
    return tf.IndexedSlices(
        tf.gather(values, order), tf.gather(rows, order), slices.dense_shape
    )


def adasum(
    tensors: Sequence[tf.Tensor], process_set: ProcessSet, name: str | None = None
) -> list[tf.Tensor]:
    """Return the Adasum of each tensor over the ranks; the same bits on every rank.

    Every rank gathers all tensors and computes the whole tournament, in N times the
    memory of the tensors.

    Args:
        tensors: Floating-point, the same shapes and dtypes on every rank.
        process_set: The ranks that take part: 1, 2, 4, 8, ...
        name: As for ``hvd.allreduce``.

    Raises:
        NotImplementedError: If the number of ranks is not a power of two; in a graph
            ``tf.errors.InvalidArgumentError``, when it runs.
    """
    group = group_of(process_set)
    size = ranks.size(group)
    power_of_two = tf.equal(tf.bitwise.bitwise_and(size, size - 1), 0)
    if tf.executing_eagerly() and not power_of_two:
        raise NotImplementedError(ODD)
    results = []
    with tf.control_dependencies([tf.debugging.Assert(power_of_two, [ODD])]):
        for number, tensor in enumerate(tensors):
            everyone = tensorflow_ops.allgather(
                tf.reshape(tensor, [1, -1]), name and f"{name} {number}", group
            )
            results.append(tf.reshape(_tournament(everyone), tf.shape(tensor)))
    return results


def _tournament(left: tf.Tensor) -> tf.Tensor:
    """Reduce ``[ranks, n]`` to ``[1, n]``, in rounds that halve the number of rows."""
    (winner,) = tf.while_loop(
        lambda left: tf.shape(left)[0] > 1,
        lambda left: (_pairs(left[::2], left[1::2]),),
        (left,),
        (tf.TensorShape([None, left.shape[1]]),),
    )
    return winner


def _pairs(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Combine two ``[pairs, n]`` into one; the products are summed in float64."""

    def product(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x * y, axis=1, keepdims=True)

    wide_a, wide_b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    both = product(wide_a, wide_b)
    of_a = 1 - tf.math.divide_no_nan(both, 2 * product(wide_a, wide_a))
    of_b = 1 - tf.math.divide_no_nan(both, 2 * product(wide_b, wide_b))
    return tf.cast(of_a * wide_a + of_b * wide_b, a.dtype)
