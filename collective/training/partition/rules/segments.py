"""Rows that are added up by the number of their segment, in order of the numbers.

How many segments there are is not known before all numbers are. The largest number is
exchanged first, so that each replica has as many sums as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Node
from collective.training.partition.layouts import (
    SUM,
    WHOLE,
    Layout,
    Sharded,
)
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.rules.classes import Parts, jointly

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


@rule("SegmentSum", "SegmentMean")
def segments(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Sum over the replicas; a mean is the quotient of two sums."""
    x, layouts = node.inputs[0], summed(layouts)
    found = [lay for lay in layouts if isinstance(lay, Sharded)]
    if not found:
        return whole(node)
    layout = found[0]
    if layout.axis or not rows.of_batch or len(layout.blocks) > 1:
        return None
    if not x.dtype.is_floating:
        return None
    is_mean = node.type == "SegmentMean"

    def sums(part: tf.Tensor, own: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
        """Return the sums of a replica, with zeros for the segments behind its last one."""
        found = tf.math.segment_sum(part, own)
        missing = tf.cast(most, tf.int64) + 1 - tf.shape(found, tf.int64)[0]
        pads = tf.scatter_nd([[0, 1]], missing[None], [part.shape.rank, 2])
        return tf.pad(found, pads)

    def make(
        emission: Emission, parts: Parts, inputs: Sequence[Parts]
    ) -> list[list[tf.Tensor]]:
        of = inputs[1]
        last = [tf.reduce_max(tf.concat([[-1], tf.cast(n, tf.int64)], 0)) for n in of]
        (most,) = emission.pending.at_once("max", [last])
        pairs = list(zip(parts, of, strict=True))
        found = [sums(part, own, most) for part, own in pairs]
        if not is_mean:
            return [found]
        counts = [
            sums(tf.ones(tf.shape(own, tf.int64), part.dtype), own, most)
            for part, own in pairs
        ]
        total, count = emission.pending.at_once("sum", [found, counts])
        rank = found[0].shape.rank
        beside = tf.reshape(tf.maximum(count, 1), [-1] + [1] * (rank - 1))
        return [[total / beside]]

    return jointly([layout, layout], [WHOLE if is_mean else SUM], make)
