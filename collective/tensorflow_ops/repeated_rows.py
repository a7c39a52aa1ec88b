"""Rows that are given several times, added up with the same bits on every rank.

A GPU adds up the repeated rows of ``tf.IndexedSlices`` by atomic operations, in whatever
order. Ranks that update a table by the same slices would part by rounding, so these sums
are made on the host; all else stays where it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from collective.tensorflow_ops.xla import not_compiled


@contextlib.contextmanager
def added_in_order(tensors: Sequence[Any]) -> Iterator[None]:
    """Inside, ``tf.IndexedSlices`` become dense on the host, where there is a GPU.

    Args:
        tensors: What is computed with: nothing changes where none has rows. Outside of a
            graph, all that is computed inside runs on the host.
    """
    if not parts_ranks(tensors):
        yield
    elif tf.executing_eagerly():
        with tf.device("CPU:0"):
            yield
    else:
        # XLA would take the sums into a cluster of the GPU.
        with tf.compat.v1.device(_host_for_sums), not_compiled():
            yield


def parts_ranks(tensors: Sequence[Any]) -> bool:
    """Whether adding up the rows of a tensor may give each rank other bits."""
    has_rows = any(isinstance(t, tf.IndexedSlices) for t in tensors)
    return has_rows and bool(tf.config.list_logical_devices("GPU"))


def _host_for_sums(operation: Any) -> str:
    of_rows = operation.type == "UnsortedSegmentSum"
    return "/device:CPU:0" if of_rows else str(operation.device)


def added_once(indices: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Rows and their numbers, where those that are given several times are added up.

    Whoever adds them to a table then does it in no order: a GPU, and the threads of a
    processor, add up rows that come twice in another order each time.
    """
    with tf.device("/device:CPU:0"):
        rows, places = tf.unique(tf.reshape(indices, [-1]))
        return rows, tf.math.unsorted_segment_sum(values, places, tf.size(rows))
