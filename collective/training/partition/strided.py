"""Python's indexing, ``x[1:, ..., None]``, as TensorFlow writes it down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from collective.training.partition.graph import Node, sizes_in
from collective.training.partition.sizes import (
    AnySize,
    above_zero,
    fraction,
    is_natural,
)


class Entry(NamedTuple):
    """What an index does with one axis."""

    axis: int | None  # of the input; None for a new axis
    out: int | None  # of the output; None if the axis is dropped
    begin: Any  # the first place, or None if unknown
    length: AnySize | None  # the number of places, or None if unknown
    step: int
    is_full: bool  # whether all places are taken, in order


def entries_of(node: Node) -> list[Entry] | None:
    """Return the entries of a ``StridedSlice``, or None if too little is known."""
    x = node.inputs[0]
    if x.shape is None:
        return None
    return entries(node, x.shape, node.inputs[1:4])


def entries(
    node: Node, shape: Sequence[AnySize], bounds: Sequence[Any]
) -> list[Entry] | None:
    """Return the entries of an index into a tensor of this shape.

    Args:
        bounds: The values begin, end and strides.
    """
    strides = sizes_in(bounds[2])
    if not isinstance(strides, tuple) or not all(isinstance(s, int) for s in strides):
        return None
    count, rank = len(strides), len(shape)
    begin, end = (
        found if isinstance(found, tuple) else (None,) * count
        for found in map(sizes_in, bounds[:2])
    )
    masks = {
        name: node.attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }

    def has(name: str, place: int) -> bool:
        return bool(masks[name] >> place & 1)

    taken = sum(not has("ellipsis", i) and not has("new_axis", i) for i in range(count))
    found: list[Entry] = []
    axis = out = 0

    def full() -> None:
        nonlocal axis, out
        found.append(Entry(axis, out, 0, shape[axis], 1, True))
        axis, out = axis + 1, out + 1

    for i in range(count):
        if has("ellipsis", i):
            for _ in range(rank - taken):
                full()
        elif has("new_axis", i):
            found.append(Entry(None, out, 0, 1, 1, False))
            out += 1
        elif has("shrink_axis", i):
            place = _place(begin[i], shape[axis])
            found.append(Entry(axis, None, place, 1, 1, False))
            axis += 1
        else:
            first = None if has("begin", i) else (begin[i],)
            last = None if has("end", i) else (end[i],)
            found.append(_range(axis, out, shape[axis], first, last, strides[i]))
            axis, out = axis + 1, out + 1
    while axis < rank:
        full()
    return found


def _place(place: AnySize | None, size: AnySize) -> AnySize | None:
    """Return a place counted from the front."""
    if isinstance(place, int) and place < 0:
        return size + place
    return place


def _range(
    axis: int, out: int, size: AnySize, first: Any, last: Any, step: int
) -> Entry:
    """Return ``first:last:step`` of an axis; a bound that is left out is None."""
    if (first in (None, (0,))) and last in (None, (size,)) and step == 1:
        return Entry(axis, out, 0, size, 1, True)
    bounds = [b if b is None else b[0] for b in (first, last)]
    open_ = [b is None for b in (first, last)]
    if isinstance(size, int) and all(
        o or isinstance(b, int) for o, b in zip(open_, bounds, strict=True)
    ):
        begin, stop, step = slice(bounds[0], bounds[1], step).indices(size)
        return Entry(axis, out, begin, len(range(begin, stop, step)), step, False)
    if step < 0 and all(open_):  # backwards
        length = fraction(size - step - 1, -step)
        return Entry(axis, out, size - 1, length, step, False)
    if step < 0:
        return Entry(axis, out, None, None, step, False)
    start = 0 if open_[0] else _place(bounds[0], size)
    end = size if open_[1] else _place(bounds[1], size)
    is_counted = all(map(_is_counted, bounds, open_))
    if start is None or end is None or not is_counted:
        return Entry(axis, out, None, None, step, False)
    # Python cuts off a bound beyond an end, and takes nothing if they cross.
    if not (is_natural(size - end) and is_natural(start)):
        start, end = (
            above_zero(b) if is_natural(size - b) else size - above_zero(size - b)
            for b in (start, end)
        )
    length = fraction(above_zero(end - start) + step - 1, step)
    return Entry(axis, out, start, length, step, False)


def _is_counted(bound: AnySize | None, is_open: bool) -> bool:
    """Return whether a bound is known, and from which end it is counted."""
    return (
        is_open or isinstance(bound, int) or (bound is not None and is_natural(bound))
    )
