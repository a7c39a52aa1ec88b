"""Sizes that a program computes with, such as ``tf.shape(x)[0] * 2``, as polynomials."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from collective.training.partition.graph import MOST_SIZES, Node, Sizes, Value, sizes_in
from collective.training.partition.sizes import (
    AnySize,
    above_zero,
    fraction,
    is_natural,
    product,
    quotient,
    total,
)
from collective.training.partition.strided import entries_of
from collective.training.partition.values import size_rule


@size_rule("Shape", "ShapeN")
def _shape_sizes(node: Node) -> Sizes:
    return [v.shape for v in node.inputs]


@size_rule("Size")
def _size_sizes(node: Node) -> Sizes:
    shape = node.inputs[0].shape
    return None if shape is None else product(shape)


@size_rule("Rank")
def _rank_sizes(node: Node) -> Sizes:
    return node.inputs[0].rank


@size_rule("SparseCross", "SparseCrossHashed")
def _crossed(node: Node) -> Sizes:
    shapes = [value.shape for value in node.inputs]
    count = len(node.op.get_attr("dense_types"))
    known = [shape for shape in shapes[:count] if shape is not None]
    if node.op.get_attr("N") or len(known) < count:
        return None
    return [None, None, (known[0][0], product(shape[1] for shape in known))]


@size_rule("Identity", "StopGradient", "Snapshot")
def _same(node: Node) -> Sizes:
    return node.inputs[0].sizes


@size_rule("ZerosLike", "OnesLike")
def _filled(node: Node) -> Sizes:
    known = node.inputs[0].shape or ()
    shape = [size for size in known if isinstance(size, int)]
    if not node.inputs[0].is_static or math.prod(shape) > MOST_SIZES:
        return None
    return _untabled(np.full(shape, int(node.type == "OnesLike"), object))


@size_rule("Cast")
def _cast(node: Node) -> Sizes:
    return node.inputs[0].sizes if node.inputs[0].dtype.is_integer else None


def _table(value: Value) -> Any:
    """Return the sizes that a value holds as an array of objects, or None if unknown."""
    sizes = sizes_in(value)
    return None if sizes is None else np.array(sizes, object)


def _untabled(sizes: np.ndarray | Sizes) -> Sizes:
    """Convert an array of sizes to an int, a tuple, or a tuple of tuples."""
    if not isinstance(sizes, np.ndarray) or sizes.ndim == 0:
        return sizes.item() if isinstance(sizes, np.ndarray) else sizes
    if sizes.ndim == 1:
        return tuple(sizes)
    return tuple(map(tuple, sizes)) if sizes.ndim == 2 else None


@size_rule("Pack")
def _packed(node: Node) -> Sizes:
    parts = [_table(v) for v in node.inputs]
    if any(p is None for p in parts):
        return None
    return _untabled(np.stack(parts, node.attr("axis")))


@size_rule("Unpack")
def _unpacked(node: Node) -> Sizes:
    sizes = _table(node.inputs[0])
    if sizes is None:
        return None
    return [_untabled(part) for part in np.moveaxis(sizes, node.attr("axis"), 0)]


@size_rule("ConcatV2")
def _joined(node: Node) -> Sizes:
    parts, axis = [_table(v) for v in node.inputs[:-1]], node.inputs[-1].const
    if axis is None or any(p is None for p in parts):
        return None
    return _untabled(np.concatenate(parts, int(axis)))


@size_rule("Transpose")
def _turned(node: Node) -> Sizes:
    sizes, order = _table(node.inputs[0]), node.inputs[1].const
    if sizes is None or order is None:
        return None
    return _untabled(sizes.transpose([int(i) for i in order]))


@size_rule("StridedSlice")
def _picked(node: Node) -> Sizes:
    sizes, entries = _table(node.inputs[0]), entries_of(node)
    if sizes is None or entries is None:
        return None
    index: list[Any] = []
    for entry in entries:
        if entry.axis is None:
            index.append(None)
        elif not isinstance(entry.begin, int) or not isinstance(entry.length, int):
            return None
        elif entry.out is None:
            index.append(entry.begin)
        else:
            stop = entry.begin + entry.length * entry.step
            index.append(slice(entry.begin, stop if stop >= 0 else None, entry.step))
    return _untabled(sizes[tuple(index)])


@size_rule("Split", "SplitV")
def _split(node: Node) -> Sizes:
    of_axis, at = (0, 1) if node.type == "Split" else (2, 0)
    sizes, axis = _table(node.inputs[at]), node.inputs[of_axis].const
    shapes = [value.shape for value in node.outputs]
    if sizes is None or axis is None or any(shape is None for shape in shapes):
        return None
    along = [shape[int(axis)] for shape in shapes if shape is not None]
    lengths = [length for length in along if isinstance(length, int)]
    if len(lengths) < len(along):
        return None
    return list(map(_untabled, np.split(sizes, np.cumsum(lengths)[:-1], int(axis))))


@size_rule("Slice")
def _sliced(node: Node) -> Sizes:
    sizes, begins, counts = _table(node.inputs[0]), *map(sizes_in, node.inputs[1:])
    if sizes is None or not isinstance(begins, tuple) or not isinstance(counts, tuple):
        return None
    if not all(isinstance(n, int) for n in (*begins, *counts)):
        return None
    index = tuple(
        slice(begin, None if count == -1 else begin + count)
        for begin, count in zip(begins, counts, strict=True)
    )
    return _untabled(sizes[index])


@size_rule("GatherV2")
def _gathered(node: Node) -> Sizes:
    sizes, places = _table(node.inputs[0]), node.inputs[1].const
    axis = node.inputs[2].const
    if sizes is None or places is None or axis is None or node.attr("batch_dims"):
        return None
    return _untabled(sizes.take(places, int(axis)))


@size_rule("Reshape", "ExpandDims", "Squeeze")
def _reshaped(node: Node) -> Sizes:
    sizes, out = _table(node.inputs[0]), node.outputs[0]
    if sizes is None or out.shape is None or not out.is_static:
        return None
    return _untabled(sizes.reshape(out.shape))


@size_rule("ConcatOffset")
def _offsets(node: Node) -> Sizes:
    axis, shapes = node.inputs[0].const, [sizes_in(v) for v in node.inputs[1:]]
    if axis is None or any(not isinstance(shape, tuple) for shape in shapes):
        return None
    place, found, before = int(axis) % len(shapes[0]), [], 0
    for shape in shapes:
        found.append(tuple(before if i == place else 0 for i in range(len(shape))))
        before = before + shape[place]
    return found


@size_rule("DynamicStitch")
def _stitched(node: Node) -> Sizes:
    count = node.attr("N")
    found: dict[int, AnySize] = {}
    for places, data in zip(node.inputs[:count], node.inputs[count:], strict=True):
        at, sizes = (
            s if isinstance(s, tuple) else (s,) for s in map(sizes_in, (places, data))
        )
        if None in at or None in sizes or len(at) != len(sizes):
            return None
        found.update(zip(at, sizes, strict=True))
    if set(found) != set(range(len(found))):
        return None
    return tuple(found[i] for i in range(len(found)))


@size_rule("Prod")
def _multiplied(node: Node) -> Sizes:
    sizes = _table(node.inputs[0])
    return None if sizes is None or node.outputs[0].rank else product(sizes.flat)


@size_rule("Sum")
def _added(node: Node) -> Sizes:
    sizes = _table(node.inputs[0])
    return None if sizes is None or node.outputs[0].rank else total(sizes.flat)


def _each(node: Node, compute: Callable[[AnySize, AnySize], AnySize | None]) -> Sizes:
    a, b = map(_table, node.inputs[:2])
    if a is None or b is None:
        return None
    found = np.frompyfunc(compute, 2, 1)(a, b)
    found = np.array(found, object)
    return None if None in found.flat else _untabled(found)


@size_rule("Mul")
def _times(node: Node) -> Sizes:
    return _each(node, lambda a, b: a * b)


@size_rule("AddV2", "Add")
def _plus(node: Node) -> Sizes:
    return _each(node, lambda a, b: a + b)


@size_rule("Sub")
def _minus(node: Node) -> Sizes:
    return _each(node, lambda a, b: a - b)


@size_rule("FloorDiv", "TruncateDiv")
def _divided(node: Node) -> Sizes:
    return _each(node, _divide)


def _divide(a: AnySize, b: AnySize) -> AnySize | None:
    if isinstance(b, int) and b > 0 and is_natural(a):
        return fraction(a, b)
    return quotient(a, b)


@size_rule("Maximum")
def _most(node: Node) -> Sizes:
    return _each(node, lambda a, b: b + above_zero(a - b))


@size_rule("Minimum")
def _least(node: Node) -> Sizes:
    return _each(node, lambda a, b: a - above_zero(a - b))


@size_rule("BroadcastGradientArgs")
def _reduced_axes(node: Node) -> Sizes:
    a, b = (sizes_in(v) for v in node.inputs)
    if not (isinstance(a, tuple) and isinstance(b, tuple)):
        return None
    rank = max(len(a), len(b))
    a, b = ((1,) * (rank - len(s)) + s for s in (a, b))
    first, second = [], []
    for axis, (x, y) in enumerate(zip(a, b, strict=True)):
        if x == y != 1:
            continue
        if x != 1 and y != 1:
            return None
        first += [axis] * (x == 1)
        second += [axis] * (y == 1)
    return [tuple(first), tuple(second)]
