"""What is known of the values of a graph: whole shapes, constants, and sizes.

A step is mostly traced for batches of any length, so TensorFlow knows few shapes. But the
sizes that a program computes with (``tf.shape(x)[0] * 2``) are followed here as
polynomials of the rows, and so the shape of what they make is known after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.training.keras_compat import tensorflow_names
from collective.training.partition.graph import Node, Value, sizes_in
from collective.training.partition.layouts import Shape
from collective.training.partition.sizes import AnySize, Size, product, quotient, total
from collective.training.partition.strided import entries_of

#: Elements of a value that is computed while the graph is read, at most.
_FOLDED = 20_000
# Types whose result is small though an operand may be large.
_ALWAYS_FOLDED = {"BroadcastGradientArgs", "Shape", "ShapeN", "Size", "Rank"}
_NEVER_FOLDED = (tf.variant, tf.resource, tf.string)

_SHAPES: dict[str, Callable[[Node], Shape | list[Shape]]] = {}
_SIZES: dict[str, Callable[[Node], Any]] = {}


def learn(node: Node) -> None:
    """Finds out about a node's outputs from its inputs."""
    if node.type == "Const":
        if node.outputs[0].dtype != tf.string:
            tensor = node.op.node_def.attr["value"].tensor
            node.outputs[0].const = tf.make_ndarray(tensor)
    elif _is_foldable(node):
        try:
            results = tensorflow_names.run_operation(
                node.op, [v.const for v in node.inputs if v.const is not None]
            )
        except (tf.errors.OpError, ValueError, TypeError):
            results = []  # it fails in the step, too, if it is run there
        for value, result in zip(node.outputs, results, strict=False):
            value.const = result
            value.shape = result.shape
    if node.outputs and node.outputs[0].const is None:
        _learn_shapes(node)
        _learn_sizes(node)


def is_constant(node: Node) -> bool:
    """Whether all that a node makes is known."""
    return bool(node.outputs) and all(v.const is not None for v in node.outputs)


def axes_in(value: Value, rank: int | None) -> list[int] | None:
    """The axes that a constant names, counted from the front; None if unknown."""
    if value.const is None or rank is None:
        return None
    return [int(a) % rank if rank else 0 for a in np.reshape(value.const, -1)]


def axis_in(value: Value, rank: int | None) -> int | None:
    """The one axis that a constant names."""
    axes = axes_in(value, rank)
    return axes[0] if axes else None


def broadcast(shapes: Sequence[Shape]) -> list[AnySize | None] | None:
    """The sizes of what is made of operands of these shapes; None where unknown."""
    if any(shape is None for shape in shapes):
        return None
    rank = max((len(s) for s in shapes if s is not None), default=0)
    sizes: list[AnySize | None] = []
    for axis in range(rank):
        found: AnySize | None = 1
        for shape in shapes:
            assert shape is not None
            place = axis - rank + len(shape)
            size = shape[place] if place >= 0 else 1
            if size == 1 or size == found:
                continue
            if found == 1 or (isinstance(size, int) and isinstance(found, Size)):
                found = size
            elif not (isinstance(found, int) and isinstance(size, Size)):
                found = None
                break
        sizes.append(found)
    return sizes


# --- constants ---------------------------------------------------------------------


def _is_foldable(node: Node) -> bool:
    if node.is_stateful or node.bodies or not node.inputs:
        return False
    if any(v.const is None for v in node.inputs):
        return False
    if any(v.dtype in _NEVER_FOLDED for v in node.outputs):
        return False
    if node.type in _ALWAYS_FOLDED or not node.outputs:
        return bool(node.outputs)
    read = max(np.asarray(v.const).size for v in node.inputs)
    if any(v.shape is None or not v.is_static for v in node.outputs):
        return bool(read <= _FOLDED)
    made = [product(v.shape or ()) for v in node.outputs]
    return all(isinstance(size, int) and size <= _FOLDED for size in made)


# --- shapes ------------------------------------------------------------------------


def _learn_shapes(node: Node) -> None:
    rule = _SHAPES.get(node.type)
    found = None if rule is None else rule(node)
    if found is None:
        found = _inferred(node)
    if found is None:
        return
    shapes = found if isinstance(found, list) else [found]
    for value, shape in zip(node.outputs, shapes, strict=False):
        if shape is None:
            continue
        known = value.static_shape()
        if known is None or len(known) != len(shape):
            value.shape = shape if known is None else known
            continue
        # What TensorFlow knows as a number stays.
        value.shape = tuple(
            old if isinstance(old, int) or new is None else new
            for old, new in zip(known, shape, strict=True)
        )


def of_rows(*types: str) -> None:
    """Declares operations whose outputs have as many rows as their first input."""
    _OF_ROWS.update(types)


def _inferred(node: Node) -> list[Shape] | None:
    """What TensorFlow finds out, where more is known here than when it was traced.

    As in the body of a loop, of whose variables TensorFlow knows no shape.
    """
    if node.is_stateful or node.bodies or all(v.is_static for v in node.outputs):
        return None
    shapes = [v.shape for v in node.inputs]
    known = [
        [None if isinstance(s, Size) else s for s in shape]
        for shape in shapes
        if shape is not None
    ]
    given = iter(known)
    found = tensorflow_names.inferred_shapes(
        node.op,
        [None if shape is None else next(given) for shape in shapes],
        [v.const for v in node.inputs],
    )
    if found is None:
        return None
    results: list[Shape] = []
    for value, shape in zip(node.outputs, found, strict=True):
        if shape is None:
            results.append(None)
            continue
        sizes = [value.symbol(i) if s is None else s for i, s in enumerate(shape)]
        if node.type in _OF_ROWS and sizes and shape[0] is None and shapes[0]:
            sizes[0] = shapes[0][0]
        results.append(tuple(sizes))
    return results


_OF_ROWS: set[str] = set()


def _shapes(*types: str) -> Callable[[Any], Any]:
    def add(rule: Any) -> Any:
        for name in types:
            _SHAPES[name] = rule
        return rule

    return add


def elementwise(*types: str) -> None:
    """Declares operations whose output has the shape that its inputs broadcast to."""
    for name in types:
        _SHAPES[name] = _broadcast_shape


def alike(*types: str) -> None:
    """Declares operations whose outputs have the shape of the first input."""
    for name in types:
        _SHAPES[name] = lambda node: [node.inputs[0].shape] * len(node.outputs)


def _broadcast_shape(node: Node) -> Any:
    sizes = broadcast([v.shape for v in node.inputs])
    return None if sizes is None else tuple(sizes)


@_shapes("Reshape")
def _reshape(node: Node) -> Shape:
    x, sizes = node.inputs[0], sizes_in(node.inputs[1])
    if not isinstance(sizes, tuple):
        return None
    if -1 not in sizes or x.shape is None:
        return sizes if -1 not in sizes else None
    place = sizes.index(-1)
    rest = quotient(product(x.shape), product(sizes[:place] + sizes[place + 1 :]))
    if rest is None:
        rest = node.outputs[0].symbol(place)
    return (*sizes[:place], rest, *sizes[place + 1 :])


@_shapes("ExpandDims")
def _expand(node: Node) -> Shape:
    x = node.inputs[0]
    axis = axis_in(node.inputs[1], None if x.rank is None else x.rank + 1)
    if axis is None or x.shape is None:
        return None
    return (*x.shape[:axis], 1, *x.shape[axis:])


@_shapes("Squeeze")
def _squeeze(node: Node) -> Shape:
    x, axes = node.inputs[0], node.attr("squeeze_dims")
    if x.shape is None or (not axes and not x.is_static):
        return None
    gone = {a % len(x.shape) for a in axes} or {
        i for i, size in enumerate(x.shape) if size == 1
    }
    return tuple(size for i, size in enumerate(x.shape) if i not in gone)


@_shapes("Transpose")
def _transpose(node: Node) -> Shape:
    x, order = node.inputs[0], node.inputs[1].const
    if x.shape is None or order is None:
        return None
    return tuple(x.shape[int(axis)] for axis in order)


@_shapes("ConcatV2")
def _concat(node: Node) -> Any:
    values = node.inputs[:-1]
    shapes = [v.shape for v in values if v.shape is not None]
    axis = axis_in(node.inputs[-1], values[0].rank)
    if len(shapes) < len(values) or axis is None:
        return None
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        return None
    # All other axes agree: a number says more than a symbol.
    known = [
        next((s for s in of if isinstance(s, int)), of[0])
        for of in zip(*shapes, strict=True)
    ]
    known[axis] = total(shape[axis] for shape in shapes)
    return tuple(known)


@_shapes("Pack")
def _pack(node: Node) -> Shape:
    shapes = [v.shape for v in node.inputs]
    if shapes[0] is None:
        return None
    axis = node.attr("axis") % (len(shapes[0]) + 1)
    return (*shapes[0][:axis], len(shapes), *shapes[0][axis:])


@_shapes("Unpack")
def _unpack(node: Node) -> Any:
    x = node.inputs[0]
    if x.shape is None:
        return None
    axis = node.attr("axis") % len(x.shape)
    return [x.shape[:axis] + x.shape[axis + 1 :]] * len(node.outputs)


@_shapes("Split")
def _split(node: Node) -> Any:
    x = node.inputs[1]
    axis = axis_in(node.inputs[0], x.rank)
    if axis is None or x.shape is None:
        return None
    size = quotient(x.shape[axis], len(node.outputs))
    if size is None:
        return None
    return [(*x.shape[:axis], size, *x.shape[axis + 1 :])] * len(node.outputs)


@_shapes("SplitV")
def _split_v(node: Node) -> Any:
    x, sizes = node.inputs[0], sizes_in(node.inputs[1])
    axis = axis_in(node.inputs[2], x.rank)
    if axis is None or x.shape is None or not isinstance(sizes, tuple):
        return None
    rest = x.shape[axis] - total(s for s in sizes if s != -1)
    sizes = [rest if s == -1 else s for s in sizes]
    return [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes]


@_shapes("Fill", "BroadcastTo")
def _filled(node: Node) -> Shape:
    sizes = sizes_in(node.inputs[0 if node.type == "Fill" else 1])
    return sizes if isinstance(sizes, tuple) and -1 not in sizes else None


@_shapes("Tile")
def _tile(node: Node) -> Shape:
    x, times = node.inputs[0], sizes_in(node.inputs[1])
    if x.shape is None or not isinstance(times, tuple):
        return None
    return tuple(size * n for size, n in zip(x.shape, times, strict=True))


@_shapes("Pad", "PadV2", "MirrorPad")
def _pad(node: Node) -> Shape:
    x, pads = node.inputs[0], node.inputs[1].const
    if x.shape is None or pads is None:
        return None
    return tuple(size + int(p.sum()) for size, p in zip(x.shape, pads, strict=True))


@_shapes("Slice")
def _slice(node: Node) -> Any:
    x, begin, size = node.inputs[0], *map(sizes_in, node.inputs[1:])
    if x.shape is None or not isinstance(size, tuple):
        return None
    begin = begin if isinstance(begin, tuple) else (None,) * len(size)
    return [
        tuple(
            (None if b is None else whole - b) if s == -1 else s
            for whole, b, s in zip(x.shape, begin, size, strict=True)
        )
    ]


@_shapes("StridedSlice")
def _strided_slice(node: Node) -> Any:
    entries = entries_of(node)
    if entries is None:
        return None
    return [tuple(e.length for e in entries if e.out is not None)]


@_shapes("GatherV2")
def _gather(node: Node) -> Shape:
    x, indices = node.inputs[:2]
    axis = axis_in(node.inputs[2], x.rank)
    if x.shape is None or indices.shape is None or axis is None:
        return None
    batch = node.attr("batch_dims") % max(len(indices.shape) + 1, 1)
    return (*x.shape[:axis], *indices.shape[batch:], *x.shape[axis + 1 :])


@_shapes("ReadVariableOp")
def _read(node: Node) -> Shape:
    return tensorflow_names.shape_of_variable(node.inputs[0].source)


@_shapes("ResourceGather")
def _look_up(node: Node) -> Any:
    indices = node.inputs[1].shape
    table = tensorflow_names.shape_of_variable(node.inputs[0].source)
    if indices is None or table is None or node.attr("batch_dims"):
        return None
    return (*indices, *table[1:])


@_shapes("OneHot")
def _one_hot(node: Node) -> Any:
    x, depth = node.inputs[0], sizes_in(node.inputs[1])
    if x.shape is None:
        return None
    axis = node.attr("axis") % (len(x.shape) + 1)
    return (*x.shape[:axis], depth, *x.shape[axis:])


@_shapes("Sum", "Mean", "Max", "Min", "Prod", "All", "Any")
def _reduced(node: Node) -> Shape:
    x = node.inputs[0]
    axes = axes_in(node.inputs[1], x.rank)
    if x.shape is None or axes is None:
        return None
    if node.attr("keep_dims"):
        return tuple(1 if i in axes else size for i, size in enumerate(x.shape))
    return tuple(size for i, size in enumerate(x.shape) if i not in axes)


@_shapes("ArgMax", "ArgMin")
def _arg(node: Node) -> Shape:
    x = node.inputs[0]
    axis = axis_in(node.inputs[1], x.rank)
    if x.shape is None or axis is None:
        return None
    return x.shape[:axis] + x.shape[axis + 1 :]


@_shapes("MatMul")
def _matmul(node: Node) -> Any:
    a, b = (v.shape for v in node.inputs)
    if a is None or b is None:
        return None
    return (
        a[1] if node.attr("transpose_a") else a[0],
        b[0] if node.attr("transpose_b") else b[1],
    )


@_shapes("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _batch_matmul(node: Node) -> Any:
    a, b = (v.shape for v in node.inputs)
    if a is None or b is None:
        return None
    batch = broadcast([a[:-2], b[:-2]])
    if batch is None:
        return None
    rows = a[-1] if node.attr("adj_x") else a[-2]
    return (*batch, rows, b[-2] if node.attr("adj_y") else b[-1])


@_shapes("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def _cross_entropy(node: Node) -> Any:
    x = node.inputs[0].shape
    return None if x is None else [x[:1], x]


@_shapes(
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessTruncatedNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
    "StatelessRandomUniform",
    "StatelessRandomNormal",
    "StatelessTruncatedNormal",
    "StatelessRandomGammaV3",
    "StatelessRandomBinomial",
    "StatelessRandomPoisson",
    "RandomUniform",
    "RandomStandardNormal",
    "TruncatedNormal",
    "RandomUniformInt",
)
def _random(node: Node) -> Shape:
    sizes = sizes_in(node.inputs[0])
    return sizes if isinstance(sizes, tuple) else None


@_shapes("Range")
def _range(node: Node) -> Any:
    start, limit, delta = map(sizes_in, node.inputs)
    if delta != 1 or start is None or limit is None:
        return None
    return (limit - start,)


# --- sizes -------------------------------------------------------------------------


def _learn_sizes(node: Node) -> None:
    rule = _SIZES.get(node.type)
    if rule is None or not node.outputs or not node.outputs[0].dtype.is_integer:
        return
    found = rule(node)
    if found is None:
        return
    many = found if isinstance(found, list) else [found]
    for value, sizes in zip(node.outputs, many, strict=False):
        value.sizes = sizes
        flat = sizes if isinstance(sizes, tuple) else (sizes,)
        if sizes is not None and all(isinstance(s, int) for s in flat):
            value.const = np.array(sizes, value.dtype.as_numpy_dtype)
        if isinstance(sizes, tuple):
            value.shape = (len(sizes),)


def _sizes(*types: str) -> Callable[[Any], Any]:
    def add(rule: Any) -> Any:
        for name in types:
            _SIZES[name] = rule
        return rule

    return add


@_sizes("Shape", "ShapeN")
def _shape_sizes(node: Node) -> Any:
    return [v.shape for v in node.inputs]


@_sizes("Size")
def _size_sizes(node: Node) -> Any:
    shape = node.inputs[0].shape
    return None if shape is None else product(shape)


@_sizes("Rank")
def _rank_sizes(node: Node) -> Any:
    return node.inputs[0].rank


@_sizes("Identity", "StopGradient", "Snapshot")
def _same(node: Node) -> Any:
    return node.inputs[0].sizes


@_sizes("Cast")
def _cast(node: Node) -> Any:
    return node.inputs[0].sizes if node.inputs[0].dtype.is_integer else None


@_sizes("Pack")
def _packed(node: Node) -> Any:
    parts = [sizes_in(v) for v in node.inputs]
    if any(p is None or isinstance(p, tuple) for p in parts):
        return None
    return tuple(parts)


@_sizes("ConcatV2")
def _joined(node: Node) -> Any:
    parts = [sizes_in(v) for v in node.inputs[:-1]]
    if any(not isinstance(p, tuple) for p in parts):
        return None
    return tuple(size for part in parts for size in part)


@_sizes("StridedSlice")
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


@_sizes("Slice")
def _sliced(node: Node) -> Any:
    sizes, begin, count = map(sizes_in, node.inputs)
    if not (isinstance(sizes, tuple) and isinstance(begin, tuple)):
        return None
    if not isinstance(count, tuple) or not isinstance(begin[0], int):
        return None
    if not isinstance(count[0], int):
        return None
    return sizes[begin[0] :] if count[0] == -1 else sizes[begin[0] :][: count[0]]


@_sizes("GatherV2")
def _gathered(node: Node) -> Any:
    sizes, places = sizes_in(node.inputs[0]), sizes_in(node.inputs[1])
    if not isinstance(sizes, tuple):
        return None
    if isinstance(places, tuple) and all(isinstance(p, int) for p in places):
        return tuple(sizes[p] for p in places)
    return sizes[places] if isinstance(places, int) else None


@_sizes("Reshape", "ExpandDims", "Squeeze")
def _turned(node: Node) -> Any:
    sizes, rank = sizes_in(node.inputs[0]), node.outputs[0].rank
    if isinstance(sizes, tuple):
        if rank == 0:
            return sizes[0] if len(sizes) == 1 else None
        return sizes if rank == 1 else None
    return (sizes,) if sizes is not None and rank == 1 else sizes if rank == 0 else None


@_sizes("ConcatOffset")
def _offsets(node: Node) -> Any:
    axis, shapes = node.inputs[0].const, [sizes_in(v) for v in node.inputs[1:]]
    if axis is None or any(not isinstance(shape, tuple) for shape in shapes):
        return None
    place, found, before = int(axis) % len(shapes[0]), [], 0
    for shape in shapes:
        found.append(tuple(before if i == place else 0 for i in range(len(shape))))
        before = before + shape[place]
    return found


@_sizes("DynamicStitch")
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


@_sizes("Prod")
def _multiplied(node: Node) -> Any:
    sizes = sizes_in(node.inputs[0])
    return (
        product(sizes)
        if isinstance(sizes, tuple) and node.outputs[0].rank == 0
        else None
    )


@_sizes("Sum")
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


@_sizes("Mul")
def _times(node: Node) -> Any:
    return _each(node, lambda a, b: a * b)


@_sizes("AddV2", "Add")
def _plus(node: Node) -> Any:
    return _each(node, lambda a, b: a + b)


@_sizes("Sub")
def _minus(node: Node) -> Any:
    return _each(node, lambda a, b: a - b)


@_sizes("FloorDiv", "TruncateDiv")
def _divided(node: Node) -> Any:
    return _each(node, quotient)


@_sizes("Maximum")
def _most(node: Node) -> Any:
    def most(a: AnySize, b: AnySize) -> AnySize | None:
        # Sizes are not negative, and a step has at least one row.
        for one, other in ((a, b), (b, a)):
            if one == other or (isinstance(other, int) and other <= 0):
                return one
        return None

    return _each(node, most)


@_sizes("BroadcastGradientArgs")
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
