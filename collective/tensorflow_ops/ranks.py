"""This process' rank and the number of ranks, as TensorFlow ops.

They are read when the graph runs. A number that Python reads while a function is traced
stays in the graph: if ranks leave or join, the function would compute with the old
number.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from collective.process_set import ProcessSet
from collective.tensorflow_ops import library


class RankInfo(NamedTuple):
    """The numbers of this process among some ranks."""

    rank: tf.Tensor  # int32, ``[]``: its number among them, or -1
    size: tf.Tensor  # int32, ``[]``: the number of these ranks
    local_rank: tf.Tensor  # int32, ``[]``: how many on this host come before it
    local_size: tf.Tensor  # int32, ``[]``: how many are on this host


def rank_info(process_set: ProcessSet | int | None = None) -> RankInfo:
    """Return this process' places among the ranks of the job or of a process set.

    Args:
        process_set: The set, or its number in the core; None or 0 for all ranks.

    Returns:
        Values in eager mode; in a graph, tensors that each run computes.

    Raises:
        tf.errors.InvalidArgumentError: When it runs, if the set is of a former job.
        CollectiveError: If the native core was not built.
    """
    group = process_set.number if isinstance(process_set, ProcessSet) else process_set
    info = RankInfo(*library.load_ops().collective_rank_info(process_set=group or 0))
    run_independently(info.rank)
    return info


def run_independently(tensor: tf.Tensor) -> None:
    """Order an op without effects neither before nor after other ops of a function.

    Args:
        tensor: An output of the op, or a value in eager mode.
    """
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(tensor.op)


def size(process_set: ProcessSet | int | None = None) -> tf.Tensor:
    """Return the number of ranks: int32, ``[]``."""
    return rank_info(process_set).size
