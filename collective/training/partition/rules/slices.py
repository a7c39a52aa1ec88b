"""Slices: of other axes, or of whole blocks of the sharded one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from collective.training.partition import offers
from collective.training.partition.graph import Node, sizes_in
from collective.training.partition.layouts import SUM, WHOLE, Layout, Sharded
from collective.training.partition.plans import (
    SOME_RULES,
    Plan,
    Rows,
    rule,
    summed,
    whole,
)
from collective.training.partition.rules import picked
from collective.training.partition.shares import pieces_of
from collective.training.partition.sizes import AnySize, is_natural, quotient, total
from collective.training.partition.strided import Entry, entries, entries_of
from collective.training.partition.values import axis_in

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

_MOST_LIKE_IT = 16  # blocks of zeros beside a slice


def blocks_within(
    layout: Sharded, begin: AnySize | None, length: AnySize | None, rows: Rows
) -> tuple[int, int] | None:
    """Return the half-open range of blocks that a slice covers, or None if it cuts one."""
    if begin is None or length is None:
        return None
    bounds = [
        total(layout.blocks[:i]) * rows.rows for i in range(len(layout.blocks) + 1)
    ]
    if begin not in bounds or begin + length not in bounds:
        return None
    first, last = bounds.index(begin), bounds.index(begin + length)
    return (first, last) if first < last else None


def _own_range(emission: Emission, layout: Sharded, blocks: tuple[int, int]) -> Any:
    """Return where the blocks begin in a replica's part, and their places: int64 scalars."""
    first, last = blocks
    begin, count = total(layout.blocks[:first]), total(layout.blocks[first:last])
    own = emission.own_rows
    return emission.number(own * begin), emission.number(own * count)


@rule("Slice")
def slice_(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Take a block, as ``tf.slice`` does."""
    if layouts[0] == SUM and all(lay == WHOLE for lay in layouts[1:]):
        return Plan(layouts, [SUM])
    layout, x = summed(layouts)[0], node.inputs[0]
    if not isinstance(layout, Sharded):
        return whole(node)
    begins, lengths = sizes_in(node.inputs[1]), sizes_in(node.inputs[2])
    if (
        not (isinstance(begins, tuple) and isinstance(lengths, tuple))
        or x.shape is None
    ):
        return None
    axis = layout.axis
    length = lengths[axis]
    length = x.shape[axis] - begins[axis] if length == -1 else length
    found = blocks_within(layout, begins[axis], length, rows)
    if found is None:
        return _slice_of_rows(node, layout, (begins[axis], length), rows)
    made = Sharded(axis, layout.blocks[found[0] : found[1]])

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        values, begin, count = inputs
        own = [tf.cast(n, begin.dtype) for n in _own_range(emission, layout, found)]
        begin, count = (
            tf.concat([given[:axis], mine[None], given[axis + 1 :]], 0)
            for given, mine in zip((begin, count), own, strict=True)
        )
        return [tf.slice(values, begin, count)]

    return Plan([layout, WHOLE, WHOLE], [made], emit)


def _slice_of_rows(
    node: Node, layout: Sharded, bounds: tuple[Any, Any], rows: Rows
) -> Plan | None:
    """Slice some of the rows: each replica keeps those of its own part."""
    axis = layout.axis
    made = picked.cut(node.outputs, layout, axis, bounds, rows)
    if made is None:
        return None
    (of,) = made

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        values, *given = inputs
        first, last = picked.own_places(emission, layout, of, bounds[0])
        own = [tf.cast(n, given[0].dtype) for n in (first, last - first)]
        begin, count = (
            tf.concat([all_[:axis], mine[None], all_[axis + 1 :]], 0)
            for all_, mine in zip(given, own, strict=True)
        )
        return [tf.slice(values, begin, count)]

    return Plan([layout, WHOLE, WHOLE], made, emit)


@rule("StridedSlice")
def strided_slice(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Index as Python does."""
    if layouts[0] == SUM and all(lay == WHOLE for lay in layouts[1:]):
        return Plan(layouts, [SUM])
    layout = summed(layouts)[0]
    if not isinstance(layout, Sharded):
        return whole(node)
    found = entries_of(node)
    if found is None:
        return None
    entry = next(e for e in found if e.axis == layout.axis)
    if entry.out is None:
        return _one_place(node, layout, found, entry, rows)
    if entry.step != 1:
        return _picked(node, layout, found, entry, rows)
    if entry.is_full:
        made = layout.moved(entry.out)
        if _keeps_masks(node, layout.axis):
            return Plan([layout, *[WHOLE] * 3], [made])
        blocks = 0, len(layout.blocks)
    else:
        within = blocks_within(layout, entry.begin, entry.length, rows)
        if within is None:
            return _picked(node, layout, found, entry, rows)
        blocks = within
        made = Sharded(entry.out, layout.blocks[blocks[0] : blocks[1]])

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        begin, count = _own_range(emission, layout, blocks)
        index = _index(found, inputs[1:], node, layout.axis, begin, begin + count)
        return [inputs[0][index]]

    return Plan([layout, *[WHOLE] * 3], [made], emit)


def _picked(
    node: Node, layout: Sharded, found: list[Entry], entry: Entry, rows: Rows
) -> Plan | None:
    """Take some of the rows: each replica keeps those of its own part."""
    if entry.begin is None or entry.length is None or entry.out is None:
        return None
    bounds = entry.begin, entry.length
    made = picked.cut(node.outputs, layout, entry.out, bounds, rows, entry.step)
    if made is None:
        return None
    (of,) = made

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        own = picked.own_places(emission, layout, of, entry.begin, entry.step)
        index = _index(found, inputs[1:], node, layout.axis, *own, entry.step)
        return [inputs[0][index]]

    return Plan([layout, *[WHOLE] * 3], made, emit)


def _one_place(
    node: Node, layout: Sharded, found: list[Entry], entry: Entry, rows: Rows
) -> Plan | None:
    """Return the first or last place: of the replica that has it, with zeros of all others.

    Another one may not be there, which is an error.
    """
    x = node.inputs[0]
    last = None if x.shape is None else x.shape[layout.axis] - 1
    if entry.begin != 0 and (entry.begin is None or entry.begin != last):
        return None
    if not is_natural(layout.per_row * rows.rows - 1):
        return None  # there may be none, which is an error
    if len(layout.blocks) > 1 or not (x.dtype.is_floating or x.dtype.is_integer):
        return None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        ((first, count),) = pieces_of(emission, layout)
        place = emission.number(entry.begin) - emission.number(first)
        own = emission.number(count)
        is_here = (place >= 0) & (place < own)
        begin = tf.clip_by_value(place, 0, own)
        end = begin + tf.cast(is_here, tf.int64)
        ranged = [
            e._replace(out=0, is_full=False) if e.axis == layout.axis else e
            for e in found
        ]
        index = _index(ranged, inputs[1:], node, layout.axis, begin, end)
        # No place, or one: its sum has no such axis.
        out = sum(e.out is not None for e in found[: found.index(entry)])
        return [tf.reduce_sum(inputs[0][index], out)]

    return Plan([layout, *[WHOLE] * 3], [SUM], emit)


def _spec_of(node: Node, axis: int, rank: int, count: int) -> int | None:
    """Return the index into begin, end and strides for an axis, or None.

    Args:
        rank: Axes of what is sliced.
        count: The length of begin.
    """
    new, ellipsis = node.attr("new_axis_mask"), node.attr("ellipsis_mask")
    taken = sum(not (new >> i & 1) and not (ellipsis >> i & 1) for i in range(count))
    at = 0
    for i in range(count):
        if ellipsis >> i & 1:
            at += rank - taken
            if axis < at:
                return None
        elif not new >> i & 1:
            if at == axis:
                return i
            at += 1
    return None


def _keeps_masks(node: Node, axis: int) -> bool:
    """Return whether the operation takes all places of an axis, however many there are."""
    count = len(sizes_in(node.inputs[3]))
    place = _spec_of(node, axis, node.inputs[0].rank or 0, count)
    if place is None:
        return True
    begin = node.inputs[1].const
    begins = node.attr("begin_mask") >> place & 1
    if not begins and begin is not None:
        begins = int(begin[place]) == 0
    return bool(begins and node.attr("end_mask") >> place & 1)


def _index(
    found: list[Entry],
    bounds: list[Any],
    node: Node,
    axis: int,
    begin: Any,
    end: Any,
    step: int = 1,
) -> tuple[Any, ...]:
    """Return the index, with other bounds along one axis."""
    index: list[Any] = []
    masks = {n: node.attr(f"{n}_mask") for n in ("begin", "end")}
    for entry in found:
        if entry.axis is None:
            index.append(tf.newaxis)
        elif entry.axis == axis:
            index.append(slice(begin, end, step))
        elif entry.is_full:
            index.append(slice(None))
        else:
            place = _place_of(node, entry, found)
            given = [tf.cast(b[place], tf.int64) for b in bounds]
            if entry.out is None:
                index.append(given[0])
            else:
                first = None if masks["begin"] >> place & 1 else given[0]
                last = None if masks["end"] >> place & 1 else given[1]
                index.append(slice(first, last, entry.step))
    return tuple(index)


def _place_of(node: Node, entry: Entry, found: list[Entry]) -> int:
    """Return the place in begin, end and strides of an entry that has one."""
    assert entry.axis is not None
    rank = sum(e.axis is not None for e in found)
    # The strides are the fourth operand of a slice and of its gradient.
    count = len(sizes_in(node.inputs[3]))
    place = _spec_of(node, entry.axis, rank, count)
    assert place is not None
    return place


@rule("StridedSliceGrad")
def strided_slice_grad(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Put zeros around what was sliced."""
    layout, sizes = summed(layouts)[4], sizes_in(node.inputs[0])
    if not isinstance(layout, Sharded):
        return whole(node)
    if not isinstance(sizes, tuple):
        return None
    found = entries(node, sizes, node.inputs[1:4])
    entry = next(
        (e for e in found or () if e.out == layout.axis and e.axis is not None), None
    )
    if entry is None or entry.step != 1 or entry.begin is None or entry.length is None:
        return None
    axis = entry.axis
    assert axis is not None and found is not None
    # Whole blocks of zeros before the rows, and after them.
    ahead = quotient(entry.begin, rows.rows)
    behind = quotient(sizes[axis] - entry.begin - entry.length, rows.rows)
    if ahead is None or behind is None:
        return None
    blocks = (*_zeros(ahead, layout), *layout.blocks, *_zeros(behind, layout))
    made = Sharded(axis, blocks)

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        shape, *bounds, upstream = inputs
        own = emission.own_rows
        local = emission.local_shape(shape, made, sizes)
        gradient = (
            emission.scalar(own * ahead, shape.dtype),
            emission.scalar(own * (ahead + layout.per_row), shape.dtype),
        )
        return [_padded(found, bounds, node, axis, gradient, local, upstream)]

    return Plan([*[WHOLE] * 4, layout], [made], emit)


@rule("StridedSliceGrad", table=SOME_RULES)
def picked_grad(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Put zeros around rows that each replica has of its own part."""
    layout, sizes = layouts[4], sizes_in(node.inputs[0])
    if not isinstance(layout, Sharded) or not isinstance(sizes, tuple):
        return None
    found = entries(node, sizes, node.inputs[1:4])
    entry = next(
        (e for e in found or () if e.out == layout.axis and e.axis is not None), None
    )
    if entry is None or entry.axis is None or entry.begin is None or found is None:
        return None
    axis, begin, step = entry.axis, entry.begin, entry.step
    made = picked.put_back(layout, axis, sizes[axis], begin, rows, step)
    if made is None:
        return None

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        shape, *bounds, upstream = inputs
        part = emission.of(made)
        own = picked.own_places(part, made, layout, begin, step)
        local = part.local_shape(shape, made, sizes)
        return [_padded(found, bounds, node, axis, own, local, upstream, step)]

    return Plan([*[WHOLE] * 4, layout], [made], emit)


def _zeros(length: AnySize, layout: Sharded) -> tuple[AnySize, ...]:
    """Make blocks of zeros beside those of a layout, to be added to their like."""
    (first, *others), count = layout.blocks, quotient(length, layout.blocks[0])
    is_even = all(block == first for block in others)
    if is_even and isinstance(count, int) and 0 <= count <= _MOST_LIKE_IT:
        return (first,) * count
    return (length,) if length else ()


def _padded(
    found: list[Entry],
    bounds: list[Any],
    node: Node,
    axis: int,
    own: tuple[Any, Any],
    local: Any,
    upstream: Any,
    step: int = 1,
) -> tf.Tensor:
    """Return ``StridedSliceGrad`` with other bounds along one axis."""
    begins: list[Any] = []
    ends: list[Any] = []
    strides: list[Any] = []
    masks = dict(begin_mask=0, end_mask=0, new_axis_mask=0, shrink_axis_mask=0)
    dtype = local.dtype

    def add(begin: Any, end: Any, step: int, *set_masks: str) -> None:
        for name in set_masks:
            masks[f"{name}_mask"] |= 1 << len(begins)
        begins.append(tf.cast(begin, dtype))
        ends.append(tf.cast(end, dtype))
        strides.append(tf.constant(step, dtype))

    for entry in found:
        if entry.axis is None:
            add(0, 0, 1, "new_axis")
        elif entry.axis == axis:
            add(*own, step)
        elif entry.is_full:
            add(0, 0, 1, "begin", "end")
        else:
            place = _place_of(node, entry, found)
            begin, end = bounds[0][place], bounds[1][place]
            if entry.out is None:
                add(begin, begin + 1, 1, "shrink_axis")
            else:
                given = [
                    name
                    for name in ("begin", "end")
                    if node.attr(f"{name}_mask") >> place & 1
                ]
                add(begin, end, entry.step, *given)
    return tf.raw_ops.StridedSliceGrad(
        shape=local,
        begin=tf.stack(begins),
        end=tf.stack(ends),
        strides=tf.stack(strides),
        dy=upstream,
        ellipsis_mask=0,
        **masks,
    )


@rule("Split", "SplitV")
def split(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Split another axis into parts, or the sharded one into whole blocks."""
    at = 1 if node.type == "Split" else 0
    x = node.inputs[at]
    if layouts[at] == SUM and node.type == "Split":
        return Plan(layouts, [SUM] * len(node.outputs))
    layout = summed(layouts)[at]
    axis = axis_in(node.inputs[0 if node.type == "Split" else 2], x.rank)
    if not isinstance(layout, Sharded):
        return whole(node)
    if axis is None:
        return None
    wanted: list[Layout] = [WHOLE] * len(layouts)
    wanted[at] = layout
    if axis != layout.axis:
        return Plan(wanted, [layout] * len(node.outputs))
    made, parts = [], []
    begin: AnySize = 0
    for value in node.outputs:
        length = None if value.shape is None else value.shape[axis]
        found = blocks_within(layout, begin, length, rows)
        if found is None or length is None:
            return _split_rows(node, at, layout, rows)
        parts.append(total(layout.blocks[found[0] : found[1]]))
        made.append(Sharded(axis, layout.blocks[found[0] : found[1]]))
        begin = begin + length

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        counts = emission.vector([emission.own_rows * part for part in parts])
        return list(tf.split(inputs[at], counts, axis, num=len(parts)))

    return Plan(wanted, made, emit)


def _split_rows(node: Node, at: int, layout: Sharded, rows: Rows) -> Plan | None:
    """Return the parts of the rows: each replica keeps those of its own part."""
    begin: AnySize = 0
    made: list[Layout] = []
    is_read = any(offers.leads_to_weights(value) for value in node.outputs)
    for value in node.outputs:
        length = None if value.shape is None else value.shape[layout.axis]
        if length is None or not is_read:
            return None
        of = picked.cut(
            [value], layout, layout.axis, (begin, length), rows, is_read=True
        )
        if of is None:
            return None
        made += of
        begin = begin + length
    wanted: list[Layout] = [WHOLE] * len(node.inputs)
    wanted[at] = layout

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        counts = emission.vector([emission.of(of).own_rows for of in made])
        return list(tf.split(inputs[at], counts, layout.axis, num=len(made)))

    return Plan(wanted, made, emit)
