"""What a GPU adds up in whatever order, made with the same bits by every rank.

A GPU adds up numbers that meet at one place, as the look-ups of one row of a table, by
atomic operations, whose order is another one each time. What is whole is made by each rank,
or device, and they would part by rounding. So these sums are made on the host; all else
stays where it is.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.training.keras_compat.tensorflow_names import (
    copy_operation,
    shape_of_variable,
)
from collective.training.partition.exchange import Exchange
from collective.training.partition.graph import Node

_SUMS = frozenset(
    {
        "UnsortedSegmentSum",
        "UnsortedSegmentProd",
        "SegmentSum",
        "SegmentSumV2",
        "SegmentMean",
        "ScatterNd",
        "TensorScatterAdd",
        "TensorScatterSub",
        "Bincount",
        "DenseBincount",
        "SparseTensorDenseMatMul",
    }
)
_INTO_A_VARIABLE = {
    "ResourceScatterAdd": tf.raw_ops.AssignAddVariableOp,
    "ResourceScatterSub": tf.raw_ops.AssignSubVariableOp,
}
_HOST = "/device:CPU:0"


def parts_ranks(node: Node, exchange: Exchange) -> bool:
    """Whether a node that every rank makes may have other bits on each."""
    if node.type not in _SUMS and node.type not in _INTO_A_VARIABLE:
        return False
    is_float = any(v.dtype.is_floating or v.dtype.is_complex for v in node.inputs)
    several = exchange.place[1] > 1 or len(exchange.devices) > 1
    return is_float and several and bool(tf.config.list_logical_devices("GPU"))


def on_host(node: Node, inputs: list[Any]) -> tf.Operation:
    """The operation of a node, in which the sums are made on the host."""
    write = _INTO_A_VARIABLE.get(node.type)
    if write is None:
        with tf.device(_HOST):
            return copy_operation(node.op, inputs)
    shape, rank = shape_of_variable(node.inputs[0].source), node.inputs[1].rank
    handle, indices, updates = inputs
    if not shape or rank is None or len(shape) - 1 + rank != len(updates.shape):
        return copy_operation(node.op, inputs)  # a scalar, for all
    with tf.device(_HOST):
        change = tf.math.unsorted_segment_sum(updates, indices, shape[0])
    return write(resource=handle, value=change)
