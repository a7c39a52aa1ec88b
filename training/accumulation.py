"""Sums micro-batches, with one in memory at a time.

K micro-batches have the same sums as one large batch, whatever their sizes. A
``while_loop`` with ``parallel_iterations=1`` keeps TensorFlow from running several at
once: the activations of one micro-batch are freed before the next one starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from collective.training.input.leaves import slice_leaf

MicroBatch = Callable[[tf.Tensor, Any, list[tf.Tensor]], tuple[Any, list[tf.Tensor]]]


def slice_rows(batch: Any, start: Any, stop: Any) -> Any:
    """Rows ``start`` to ``stop`` of every tensor in a tree."""
    return tf.nest.map_structure(lambda t: slice_leaf(t, start, stop), batch)


def accumulate(
    compute: MicroBatch,
    zeros: Callable[[], Any],
    state: list[tf.Tensor],
    rows: tf.Tensor,
    batch: Any,
    micro_batches: int,
    maybe_empty: bool,
) -> tuple[Any, list[tf.Tensor]]:
    """Sums ``compute`` over the micro-batches of a batch.

    Args:
        compute: ``compute(number, rows, state) -> (sums, state)`` for one micro-batch
            that has at least one row.
        zeros: Makes the sums over no row.
        state: Tensors passed from one micro-batch to the next.
        rows: Scalar int, rows in the batch; may be 0.
        batch: Tree of tensors with ``rows`` rows.
        micro_batches: How many; their sizes differ by one row at most.
        maybe_empty: Whether ``rows`` can be 0. False saves a branch.

    Returns:
        The sums over all rows, and the state after the last micro-batch.
    """
    if micro_batches == 1:
        whole = lambda: compute(tf.constant(0), batch, state)  # noqa: E731
        if not maybe_empty:
            return whole()
        return tf.cond(rows > 0, whole, lambda: (zeros(), state))

    def body(
        number: tf.Tensor, sums: Any, state: list[tf.Tensor]
    ) -> tuple[tf.Tensor, Any, list[tf.Tensor]]:
        start, stop = number * rows // used, (number + 1) * rows // used
        more, state = compute(number, slice_rows(batch, start, stop), state)
        return number + 1, tf.nest.map_structure(tf.add, sums, more), state

    # With fewer rows than micro-batches, each has one row: none may be empty.
    used = tf.minimum(tf.cast(micro_batches, rows.dtype), rows)
    _, sums, state = tf.while_loop(
        lambda number, *_: number < used,
        body,
        (tf.zeros([], rows.dtype), zeros(), state),
        parallel_iterations=1,
    )
    return sums, state
