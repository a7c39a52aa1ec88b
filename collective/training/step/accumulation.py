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

    def body(number: tf.Tensor, sums: Any) -> tuple[tf.Tensor, Any]:
        start, stop = number * rows // used, (number + 1) * rows // used
        more = compute(number, start, slice_rows(batch, start, stop))
        return number + 1, tf.nest.map_structure(tf.add, sums, more)

    # With fewer rows than micro-batches, each has one row: none may be empty.
    used = tf.minimum(tf.cast(micro_batches, rows.dtype), rows)
    _, sums = tf.while_loop(
        lambda number, _: number < used,
        body,
        (tf.zeros([], rows.dtype), zeros()),
        parallel_iterations=1,
    )
    return sums
