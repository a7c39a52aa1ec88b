"""Adds up rows that occur several times, with the same bits on every rank.

A GPU adds up the repeated rows of ``tf.IndexedSlices`` by atomic operations, in any
order. Ranks that update a table by the same slices would differ by rounding, so these
sums are computed on the host; everything else stays on its device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from collective.tensorflow_ops.xla import not_compiled


@contextlib.contextmanager
def added_in_order(tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> Iterator[None]:
    """Make ``tf.IndexedSlices`` dense on the host inside, if there is a GPU.

    Args:
        tensors: The inputs of the computation: nothing changes if none has rows.
            Outside of a graph, all operations inside run on the host.
    """
    if not parts_ranks(tensors):
        yield
    elif tf.executing_eagerly():
        with tf.device("CPU:0"):
            yield
    else:
        # XLA would move the sums into a cluster on the GPU.
        with tf.compat.v1.device(_host_for_sums), not_compiled():
            yield


def parts_ranks(tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> bool:
    """Return whether adding up the rows of a tensor may give each rank other bits."""
    has_rows = any(isinstance(t, tf.IndexedSlices) for t in tensors)
    return has_rows and bool(tf.config.list_logical_devices("GPU"))


def _host_for_sums(operation: tf.Operation) -> str:
    of_rows = operation.type == "UnsortedSegmentSum"
    return "/device:CPU:0" if of_rows else str(operation.device)


def added_once(indices: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return rows and their numbers, with repeated rows added up.

    Then no order is needed to add them to a table: a GPU, and the threads of a
    processor, would add up repeated rows in another order each time.
    """
    with tf.device("/device:CPU:0"):
        rows, places = tf.unique(tf.reshape(indices, [-1]))
        return rows, tf.math.unsorted_segment_sum(values, places, tf.size(rows))
