"""Sizes that a program computes with, such as ``tf.shape(x)[0] * 2``, as polynomials."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collective.training.partition.graph import Node
from collective.training.partition.sizes import AnySize, product, quotient, total
from collective.training.partition.values import size_rule, sizes_in


@size_rule("Shape", "ShapeN")
def _shape_sizes(node: Node) -> Any:
    return [v.shape for v in node.inputs]


@size_rule("Size")
def _size_sizes(node: Node) -> Any:
    shape = node.inputs[0].shape
    return None if shape is None else product(shape)


@size_rule("Rank")
def _rank_sizes(node: Node) -> Any:
    return node.inputs[0].rank


@size_rule("Identity", "StopGradient", "Snapshot")
def _same(node: Node) -> Any:
    return node.inputs[0].sizes


@size_rule("Cast")
def _cast(node: Node) -> Any:
    return node.inputs[0].sizes if node.inputs[0].dtype.is_integer else None


@size_rule("Pack")
def _packed(node: Node) -> Any:
    parts = [sizes_in(v) for v in node.inputs]
    if any(p is None or isinstance(p, tuple) for p in parts):
        return None
    return tuple(parts)


@size_rule("ConcatV2")
def _joined(node: Node) -> Any:
    parts = [sizes_in(v) for v in node.inputs[:-1]]
    if any(not isinstance(p, tuple) for p in parts):
        return None
    return tuple(size for part in parts for size in part)


@size_rule("StridedSlice")
def _picked(node: Node) -> Any:
    sizes = sizes_in(node.inputs[0])
    bounds = [sizes_in(v) for v in node.inputs[1:]]
    if not isinstance(sizes, tuple) or any(not isinstance(b, tuple) for b in bounds):
        return None
    if any(len(b) != 1 or not isinstance(b[0], int) for b in bounds):
        return None
    ((begin,), (end,), (step,)) = bounds
    if node.attr("new_axis_mask") or node.attr("ellipsis_mask"):
        return None
    if node.attr("shrink_axis_mask"):
        return sizes[begin] if -len(sizes) <= begin < len(sizes) else None
    first = None if node.attr("begin_mask") else begin
    last = None if node.attr("end_mask") else end
    return sizes[first:last:step]


@size_rule("Slice")
def _sliced(node: Node) -> Any:
    sizes, begin, count = map(sizes_in, node.inputs)
    if not (isinstance(sizes, tuple) and isinstance(begin, tuple)):
        return None
    if not isinstance(count, tuple) or not isinstance(begin[0], int):
        return None
    if not isinstance(count[0], int):
        return None
    return sizes[begin[0] :] if count[0] == -1 else sizes[begin[0] :][: count[0]]


@size_rule("GatherV2")
def _gathered(node: Node) -> Any:
    sizes, places = sizes_in(node.inputs[0]), sizes_in(node.inputs[1])
    if not isinstance(sizes, tuple):
        return None
    if isinstance(places, tuple) and all(isinstance(p, int) for p in places):
        return tuple(sizes[p] for p in places)
    return sizes[places] if isinstance(places, int) else None


@size_rule("Reshape", "ExpandDims", "Squeeze")
def _turned(node: Node) -> Any:
    sizes, rank = sizes_in(node.inputs[0]), node.outputs[0].rank
    if isinstance(sizes, tuple):
        if rank == 0:
            return sizes[0] if len(sizes) == 1 else None
        return sizes if rank == 1 else None
    return (sizes,) if sizes is not None and rank == 1 else sizes if rank == 0 else None


@size_rule("ConcatOffset")
def _offsets(node: Node) -> Any:
    axis, shapes = node.inputs[0].const, [sizes_in(v) for v in node.inputs[1:]]
    if axis is None or any(not isinstance(shape, tuple) for shape in shapes):
        return None
    place, found, before = int(axis) % len(shapes[0]), [], 0
    for shape in shapes:
        found.append(tuple(before if i == place else 0 for i in range(len(shape))))
        before = before + shape[place]
    return found


@size_rule("DynamicStitch")
def _stitched(node: Node) -> Any:
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
def _multiplied(node: Node) -> Any:
    sizes = sizes_in(node.inputs[0])
    return (
        product(sizes)
        if isinstance(sizes, tuple) and node.outputs[0].rank == 0
        else None
    )


@size_rule("Sum")
def _added(node: Node) -> Any:
    sizes = sizes_in(node.inputs[0])
    return (
        total(sizes) if isinstance(sizes, tuple) and node.outputs[0].rank == 0 else None
    )


def _each(node: Node, compute: Callable[[AnySize, AnySize], AnySize | None]) -> Any:
    a, b = (sizes_in(v) for v in node.inputs[:2])
    if a is None or b is None:
        return None
    if isinstance(a, tuple) or isinstance(b, tuple):
        length = max(len(p) for p in (a, b) if isinstance(p, tuple))
        a, b = (
            p * (length if len(p) == 1 else 1)
            if isinstance(p, tuple)
            else (p,) * length
            for p in (a, b)
        )
        if len(a) != len(b):
            return None
        found = tuple(compute(x, y) for x, y in zip(a, b, strict=True))
        return None if None in found else found
    return compute(a, b)


@size_rule("Mul")
def _times(node: Node) -> Any:
    return _each(node, lambda a, b: a * b)


@size_rule("AddV2", "Add")
def _plus(node: Node) -> Any:
    return _each(node, lambda a, b: a + b)


@size_rule("Sub")
def _minus(node: Node) -> Any:
    return _each(node, lambda a, b: a - b)


@size_rule("FloorDiv", "TruncateDiv")
def _divided(node: Node) -> Any:
    return _each(node, quotient)


@size_rule("Maximum")
def _most(node: Node) -> Any:
    def most(a: AnySize, b: AnySize) -> AnySize | None:
        # Sizes are not negative, and a step has at least one row.
        for one, other in ((a, b), (b, a)):
            if one == other or (isinstance(other, int) and other <= 0):
                return one
        return None

    return _each(node, most)


@size_rule("BroadcastGradientArgs")
def _reduced_axes(node: Node) -> Any:
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
