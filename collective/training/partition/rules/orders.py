"""Orders: running sums, and rows that are turned round or moved on.

Along the axes of each row these are nothing but the plain operation. Along the rows, a
running sum needs the sums of the replicas ahead, and a roll needs the rows that come from
another replica. Backwards, nearly all rows do: they are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Node
from collective.training.partition.layouts import ROWS, WHOLE, Layout, Sharded
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.rules.classes import Parts, jointly
from collective.training.partition.shares import pieces_of
from collective.training.partition.sizes import about, product
from collective.training.partition.values import alike, axes_in

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

# Elements of a row: of fewer, all rows cost less than two exchanges.
_WORTH_TWO = 8

alike(
    "Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll", "ReverseSequence"
)


def _along_others(node: Node, layouts: list[Layout], place: int) -> Plan | None:
    """Return the plan of an operation along axes that are not sharded."""
    axes = axes_in(node.inputs[place], node.inputs[0].rank)
    if not isinstance(layouts[0], Sharded):
        return whole(node) if all(lay == WHOLE for lay in layouts) else None
    if axes is None or layouts[0].axis in axes:
        return None
    rest = [WHOLE] * (len(layouts) - 1)
    return Plan([layouts[0], *rest], [layouts[0]])


def _is_alone(node: Node, layout: Layout, place: int, rows: Rows) -> bool:
    """Return whether an operation works along the sharded axis alone, and rows are large."""
    x = node.inputs[0]
    axes = axes_in(node.inputs[place], x.rank)
    if not isinstance(layout, Sharded) or len(layout.blocks) > 1 or x.shape is None:
        return False
    if not rows.of_batch:
        return False
    rest = product(size for axis, size in enumerate(x.shape) if axis != layout.axis)
    return axes == [layout.axis] and about(rest, None) >= _WORTH_TWO


@rule("ReverseV2")
def backwards(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Reverse along axes of each row."""
    return _along_others(node, summed(layouts), 1)


_TOTALS: dict[str, tuple[Callable[..., tf.Tensor], float]] = {
    "Cumsum": (tf.reduce_sum, 0),
    "Cumprod": (tf.reduce_prod, 1),
    "CumulativeLogsumexp": (tf.reduce_logsumexp, -math.inf),
}


@rule(*_TOTALS)
def running(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Begin, along the rows, with the total of the replicas ahead."""
    layouts = summed(layouts)
    layout, reverse = layouts[0], node.attr("reverse")
    if not _is_alone(node, layout, 1, rows) or not isinstance(layout, Sharded):
        return _along_others(node, layouts, 1)
    axis, (reduce, nothing) = layout.axis, _TOTALS[node.type]

    def make(
        emission: Emission, parts: Parts, inputs: Sequence[Parts]
    ) -> list[list[tf.Tensor]]:
        totals = [reduce(part, axis, keepdims=True) for part in parts]
        firsts = [emission.number(emission.first_row)[None] for _ in emission.each()]
        pending, made = emission.pending, []
        each = pending.gathered_at_once(emission, totals, Sharded(axis))
        begins = pending.gathered_at_once(emission, firsts, ROWS)
        for replica in emission.each():
            # A replica without rows begins where another one does, and has no total.
            own = firsts[replica]
            is_ahead = begins > own if reverse else begins < own
            shape = [-1 if i == axis else 1 for i in range(each.shape.rank)]
            content = tf.cast(nothing, each.dtype)
            ahead = tf.where(tf.reshape(is_ahead, shape), each, content)
            before = reduce(ahead, axis, keepdims=True)
            given = [parts[replica], before] if reverse else [before, parts[replica]]
            joined = tf.concat(given, axis)
            (found,) = emission.copy(node, [joined, tf.constant(axis)])
            begin = [0] * each.shape.rank
            begin[axis] = 0 if reverse else 1
            count = tf.shape(parts[replica], tf.int64)
            made.append(tf.slice(found, tf.constant(begin, tf.int64), count))
        return [made]

    return jointly([layout, WHOLE], [layout], make)


@rule("Roll")
def roll(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Send the rows that another replica needs."""
    layouts = summed(layouts)
    layout = layouts[0]
    if not _is_alone(node, layout, 2, rows) or not isinstance(layout, Sharded):
        return _along_others(node, layouts, 2)
    axis, size = layout.axis, layout.per_row * rows.rows

    def make(
        emission: Emission, parts: Parts, inputs: Sequence[Parts]
    ) -> list[list[tf.Tensor]]:
        shift = tf.cast(tf.reshape(inputs[1][0], []), tf.int64)
        goals, stays, bounds = [], [], []
        for _ in emission.each():
            ((first, count),) = pieces_of(emission, layout)
            begin, end = emission.number(first), emission.number(first + count)
            places = tf.maximum(emission.number(size), 1)  # there may be no rows
            goals.append((tf.range(begin, end) + shift) % places)
            stays.append((goals[-1] >= begin) & (goals[-1] < end))
            bounds.append((begin, end))
        pairs = list(zip(parts, goals, stays, strict=True))
        sent = [tf.boolean_mask(part, ~stay, axis=axis) for part, _, stay in pairs]
        sent_to = [tf.boolean_mask(goal, ~stay) for _, goal, stay in pairs]
        pending, made = emission.pending, []
        moved = pending.gathered_at_once(emission, sent, Sharded(axis))
        moved_to = pending.gathered_at_once(emission, sent_to, ROWS)
        for (part, goal, stay), (begin, end) in zip(pairs, bounds, strict=True):
            is_mine = (moved_to >= begin) & (moved_to < end)
            kept = [tf.boolean_mask(part, stay, axis=axis)]
            kept.append(tf.boolean_mask(moved, is_mine, axis=axis))
            kept_to = [tf.boolean_mask(goal, stay), tf.boolean_mask(moved_to, is_mine)]
            order = tf.argsort(tf.concat(kept_to, 0))
            made.append(tf.gather(tf.concat(kept, axis), order, axis=axis))
        return [made]

    return jointly([layout, WHOLE, WHOLE], [layout], make)


@rule("ReverseSequence")
def reverse_sequence(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Reverse in each row as many elements as its length says."""
    layouts = summed(layouts)
    layout = layouts[0]
    if not isinstance(layout, Sharded):
        return None
    if layout.axis == node.attr("seq_dim"):
        return None
    if layout.axis == node.attr("batch_dim"):
        return Plan([layout, layout.moved(0)], [layout])
    return Plan([layout, WHOLE], [layout])
