"""Sums micro-batches, with one in memory at a time.

K micro-batches have the same sums as one large batch, whatever their sizes. A
``while_loop`` with ``parallel_iterations=1`` keeps TensorFlow from running several at
once: the activations of one micro-batch are freed before the next one starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from collective.training.input.leaves import slice_leaf

T = TypeVar("T")
#: Its number, the place of its first row, and its rows.
MicroBatch = tuple[tf.Tensor, tf.Tensor, Any]


def slice_rows(batch: Any, start: Any, stop: Any) -> Any:
    """Rows ``start`` to ``stop`` of every tensor in a tree."""
    return tf.nest.map_structure(lambda t: slice_leaf(t, start, stop), batch)


def accumulate(
    compute: Callable[[tf.Tensor, tf.Tensor, Any], T],
    spec: T,
    rows: tf.Tensor,
    batch: Any,
    micro_batches: int,
    maybe_empty: bool,
) -> T:
    """Sums ``compute`` over the micro-batches of a batch.

    Args:
        compute: The sums of one micro-batch, from its number, the place of its first
            row, and its rows; it has at least one.
        spec: Shapes and dtypes of the sums, which over no row are zero.
        rows: Scalar int, rows in the batch; may be 0.
        batch: Tree of tensors with ``rows`` rows.
        micro_batches: How many; their sizes differ by one row at most.
        maybe_empty: Whether ``rows`` can be 0. False saves a branch.
    """

    def zeros() -> Any:
        return tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), spec)

    def whole() -> Any:
        return compute(tf.constant(0), tf.constant(0), batch)

    if micro_batches == 1:
        return tf.cond(rows > 0, whole, zeros) if maybe_empty else whole()

    def add(micro_batch: MicroBatch, sums: Any) -> Any:
        return tf.nest.map_structure(tf.add, sums, compute(*micro_batch))

    return _each(rows, batch, micro_batches, add, zeros())


def accumulate_with_rows(
    compute: Callable[[tf.Tensor, tf.Tensor, Any], tuple[T, Any]],
    spec: tuple[T, Any],
    rows: tf.Tensor,
    batch: Any,
    micro_batches: int,
) -> tuple[T, Any]:
    """As ``accumulate``, for sums beside tensors that follow the rows.

    Args:
        compute: Returns sums, and a tree of tensors ``[n, ...]`` with any n.
        spec: Shapes and dtypes of both.
        rows: At least one.

    Returns:
        The sums, and the tensors of all micro-batches one after the other.
    """
    sums_spec, rows_spec = spec
    zeros = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), sums_spec)
    arrays = [
        tf.TensorArray(leaf.dtype, 0, True, infer_shape=False)
        for leaf in tf.nest.flatten(rows_spec)
    ]

    def add(micro_batch: MicroBatch, before: Any) -> Any:
        sums, arrays = before
        more, tensors = compute(*micro_batch)
        written = [
            array.write(tf.cast(micro_batch[0], tf.int32), tensor)
            for array, tensor in zip(arrays, tf.nest.flatten(tensors), strict=True)
        ]
        return tf.nest.map_structure(tf.add, sums, more), written

    sums, arrays = _each(rows, batch, micro_batches, add, (zeros, arrays))
    leaves = [array.concat() for array in arrays]
    for leaf, like in zip(leaves, tf.nest.flatten(rows_spec), strict=True):
        leaf.set_shape([None, *like.shape[1:]])
    return sums, tf.nest.pack_sequence_as(rows_spec, leaves)


def _each(
    rows: tf.Tensor,
    batch: Any,
    micro_batches: int,
    add: Callable[[MicroBatch, T], T],
    first: T,
) -> T:
    """Calls ``add`` for each micro-batch with what the call before it has returned."""

    def body(number: tf.Tensor, before: T) -> tuple[tf.Tensor, T]:
        start, stop = number * rows // used, (number + 1) * rows // used
        after = add((number, start, slice_rows(batch, start, stop)), before)
        return number + 1, after

    # With fewer rows than micro-batches, each has one row: none may be empty.
    used = tf.minimum(tf.cast(micro_batches, rows.dtype), rows)
    _, last = tf.while_loop(
        lambda number, _: number < used,
        body,
        (tf.zeros([], rows.dtype), first),
        parallel_iterations=1,
    )
    return last
