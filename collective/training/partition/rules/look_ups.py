"""Look-ups in tables that are cut by their rows over a model axis, and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Node
from collective.training.partition.layouts import WHOLE, Layout, Sharded
from collective.training.partition.plans import AXIS_RULES, Plan, Rows, rule, summed
from collective.training.partition.rules.handles import looked_up
from collective.training.partition.shares import pieces_of
from collective.training.partition.values import axis_in

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


@rule("GatherV2", "Gather", table=AXIS_RULES)
def look_up(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Look rows of a table up by number: each replica looks up those that it has."""
    table, numbers = summed(layouts)[:2]
    if not isinstance(table, Sharded) or table.axis or numbers != WHOLE:
        return None
    if node.type == "GatherV2":
        axis = axis_in(node.inputs[2], node.inputs[0].rank)
        if axis != 0 or node.attr("batch_dims"):
            return None
    return looked_up(node, table, [table, *[WHOLE] * (len(layouts) - 1)])


@rule("UnsortedSegmentSum", table=AXIS_RULES)
def added(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Add rows up by their number: a replica adds those of its part alone."""
    if any(lay != WHOLE for lay in summed(layouts)):
        return None

    def share(emission: Emission, wanted: Sharded) -> tf.Tensor | None:
        if wanted.axis or len(wanted.blocks) > 1:
            return None
        values, numbers, _ = (emission.whole_of(value) for value in node.inputs)
        if values is None or numbers is None:
            return None
        own, count = _own(emission, wanted, numbers)
        return tf.math.unsorted_segment_sum(values, own, count)

    return Plan([WHOLE] * 3, [WHOLE], share=share)


def _own(
    emission: Emission, layout: Sharded, numbers: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return numbers within a replica's part, which are -1 where they are of another; its size.

    A number that is too large for the whole is too large for the part.
    """
    ((first, count),) = pieces_of(emission, layout)
    size = emission.scalar(layout.per_row * emission.rows, numbers.dtype)
    own = emission.scalar(count, numbers.dtype)
    local = numbers - emission.scalar(first, numbers.dtype)
    is_mine = (local >= 0) & (local < own)
    others = tf.where(numbers >= size, own, -tf.ones([], numbers.dtype))
    return tf.where(is_mine, local, others), own


@rule("OneHot", table=AXIS_RULES)
def one_hot(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Add a new axis for the numbers, of which a replica makes its part alone."""
    if any(lay != WHOLE for lay in summed(layouts)):
        return None
    rank, axis = node.outputs[0].rank, node.attr("axis")

    def share(emission: Emission, wanted: Sharded) -> tf.Tensor | None:
        if rank is None or wanted.axis != axis % rank or len(wanted.blocks) > 1:
            return None
        given = [emission.whole_of(value) for value in node.inputs]
        numbers, _, on, off = given
        if numbers is None or on is None or off is None:
            return None
        ((first, count),) = pieces_of(emission, wanted)
        local = numbers - emission.scalar(first, numbers.dtype)
        depth = emission.scalar(count, tf.int32)
        return emission.copy(node, [local, depth, on, off])[0]

    return Plan([WHOLE] * 4, [WHOLE], share=share)
