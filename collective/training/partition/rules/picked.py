"""Rows that are cut out of others and put back: each replica keeps those of its own part.

Of ``x[1:]`` or of one half of a batch each replica has what is in its own rows already. So
nothing is exchanged to cut, to compute with such rows, and to put their gradient back. A
replica may have more of them than others, or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from collective.training.partition.graph import Node, Value, sizes_in
from collective.training.partition.layouts import (
    WHOLE,
    Layout,
    Sharded,
    SomeRows,
)
from collective.training.partition.offers import leads_to_weights
from collective.training.partition.plans import SOME_RULES, Plan, Rows, rule
from collective.training.partition.sizes import AnySize, about, is_natural, total
from collective.training.partition.values import axis_in

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

#: So many times fewer rows than there are cost less to gather alone.
_FEW = 4


def cut(
    values: Sequence[Value],
    layout: Sharded,
    axis: int,
    bounds: tuple[AnySize, AnySize],
    rows: Rows,
    step: int = 1,
    *,
    is_read: bool | None = None,
) -> list[Layout] | None:
    """Return the layout of rows that are cut out; None if they are better gathered.

    Args:
        values: What is made.
        layout: The layout of the tensor that they are cut out of.
        axis: Along which they lie in the result.
        bounds: The first place, and the number of places.
        step: Between the places.
        is_read: Whether it is worth it; by default, a product with weights is looked for.
    """
    begin, count = bounds
    if not rows.of_batch or any(value.is_nested for value in values):
        return None
    if len(layout.blocks) > 1 or step < 1 or not is_natural(begin):
        return None
    base = rows.some or SomeRows(0, 0, 1, layout.per_row)
    if base.begin is None or (rows.some is not None and layout.per_row != 1):
        return None
    begin = base.begin + base.step * begin
    made = SomeRows(count, begin, base.step * step, base.per_row)
    if is_read is None and rows.expected is not None:
        size = about(layout.per_row * rows.rows, rows.expected)
        is_read = _FEW * about(count, rows.expected) <= size or None
    if is_read is None:
        is_read = any(leads_to_weights(value, made) for value in values)
    return [Sharded(axis, (1,), made)] if is_read else None


def put_back(
    layout: Sharded, axis: int, size: AnySize, begin: AnySize, rows: Rows, step: int = 1
) -> Sharded | None:
    """Return the layout of a tensor that has such rows among others, or None.

    Args:
        layout: Of the rows.
        axis, size: Of the result: along which they lie, and how many places it has.
        begin, step: The first place of the rows in it, and the distance between them.
    """
    some = layout.of
    if some is None or some.begin is None or layout.blocks != (1,) or step < 1:
        return None
    if some.step % step:
        return None
    wide = some.step // step
    first = some.begin - wide * begin
    if wide == 1 and first == 0 and size == some.per_row * rows.rows:
        return Sharded(axis, (some.per_row,))
    # The last of them must still be in a row of the batch: no replica has a place else.
    last = first + wide * (size - 1)
    if not is_natural(first) or not is_natural(some.per_row * rows.rows - last - 1):
        return None
    return Sharded(axis, (1,), SomeRows(size, first, wide, some.per_row))


def own_places(
    part: Emission, layout: Sharded, of: Layout, begin: Any, step: int = 1
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return where a replica's rows ``of`` lie in its part of ``layout``: from, up to.

    Args:
        part: What has the rows of ``layout``.
        begin, step: The first place, and the distance between them, as they are whole.
    """
    some = part.of(of)
    first = part.number(begin + some.first_row * step)
    first -= part.number(part.first_row * layout.per_row)
    count = part.number(some.own_rows)
    # A replica that has none of them would begin outside of its part.
    first = tf.where(count > 0, first, 0)
    return first, first + count * step


@rule("Pad", "PadV2", table=SOME_RULES)
def pad(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Make the gradient of ``tf.slice``."""
    layout, pads, shape = layouts[0], sizes_in(node.inputs[1]), node.outputs[0].shape
    if not isinstance(layout, Sharded) or not isinstance(pads, tuple) or not shape:
        return None
    axis = layout.axis
    ahead, _ = pads[axis]
    made = put_back(layout, axis, shape[axis], ahead, rows)
    if made is None:
        return None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        values, given, *rest = inputs
        part = emission.of(made)
        first, last = own_places(part, made, layout, ahead)
        places = part.number(part.own_rows * made.per_row)
        own = tf.cast(tf.stack([first, places - last]), given.dtype)
        local = tf.concat([given[:axis], own[None], given[axis + 1 :]], 0)
        return list(emission.copy(node, [values, local, *rest]))

    return Plan([layout, *[WHOLE] * (len(layouts) - 1)], [made], emit)


@rule("ConcatV2", table=SOME_RULES)
def concat(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Concatenate parts of the rows, one after the other as they were cut."""
    axis = axis_in(node.inputs[-1], node.outputs[0].rank)
    parts = layouts[:-1]
    found = [lay.of for lay in parts if isinstance(lay, Sharded) and lay.axis == axis]
    known = [some for some in found if some is not None and some.begin is not None]
    if axis is None or len(known) < len(parts):
        return None
    if any(not isinstance(lay, Sharded) or lay.blocks != (1,) for lay in parts):
        return None
    first = known[0]
    at = first.begin
    for some in known:
        if at is None or some != dataclasses.replace(first, count=some.count, begin=at):
            return None
        at = at + some.step * some.count
    size = total(some.count for some in known)
    if first.begin == 0 and first.step == 1 and size == first.per_row * rows.rows:
        return Plan([*parts, WHOLE], [Sharded(axis, (first.per_row,))])
    made = dataclasses.replace(first, count=size)
    return Plan([*parts, WHOLE], [Sharded(axis, (1,), made)])
