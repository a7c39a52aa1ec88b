"""The whole shape of what an operation makes, from those of its inputs."""

from __future__ import annotations

from collective.training.keras_compat import tensorflow_names
from collective.training.partition.graph import Node, sizes_in
from collective.training.partition.layouts import Shape
from collective.training.partition.sizes import (
    AnySize,
    agreed,
    fraction,
    is_natural,
    product,
    quotient,
    total,
)
from collective.training.partition.strided import entries_of
from collective.training.partition.values import (
    Shapes,
    alike,
    axes_in,
    axis_in,
    broadcast,
    shape_rule,
    squeezed,
)


@shape_rule("Reshape")
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


@shape_rule("ExpandDims")
def _expand(node: Node) -> Shape:
    x = node.inputs[0]
    axis = axis_in(node.inputs[1], None if x.rank is None else x.rank + 1)
    if axis is None or x.shape is None:
        return None
    return (*x.shape[:axis], 1, *x.shape[axis:])


@shape_rule("Squeeze")
def _squeeze(node: Node) -> Shape:
    x, gone = node.inputs[0], squeezed(node)
    if x.shape is None or gone is None:
        return None
    return tuple(size for i, size in enumerate(x.shape) if i not in gone)


@shape_rule("Transpose")
def _transpose(node: Node) -> Shape:
    x, order = node.inputs[0], node.inputs[1].const
    if x.shape is None or order is None:
        return None
    return tuple(x.shape[int(axis)] for axis in order)


@shape_rule("ConcatV2")
def _concat(node: Node) -> Shapes:
    values = node.inputs[:-1]
    shapes = [v.shape for v in values if v.shape is not None]
    axis = axis_in(node.inputs[-1], values[0].rank)
    if len(shapes) < len(values) or axis is None:
        return None
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        return None
    known = [agreed(of) for of in zip(*shapes, strict=True)]
    known[axis] = total(shape[axis] for shape in shapes)
    return [tuple(known)]


@shape_rule("Pack")
def _pack(node: Node) -> Shapes:
    shapes = [v.shape for v in node.inputs if v.shape is not None]
    if not shapes or len({len(shape) for shape in shapes}) > 1:
        return None
    known = [agreed(of) for of in zip(*shapes, strict=True)]
    axis = node.attr("axis") % (len(known) + 1)
    return [(*known[:axis], len(node.inputs), *known[axis:])]


@shape_rule("Unpack")
def _unpack(node: Node) -> Shapes:
    x = node.inputs[0]
    if x.shape is None:
        return None
    axis = node.attr("axis") % len(x.shape)
    return [x.shape[:axis] + x.shape[axis + 1 :]] * len(node.outputs)


@shape_rule("Split")
def _split(node: Node) -> Shapes:
    x = node.inputs[1]
    axis = axis_in(node.inputs[0], x.rank)
    if axis is None or x.shape is None:
        return None
    count = len(node.outputs)
    size = fraction(x.shape[axis], count, is_exact=True)
    return [(*x.shape[:axis], size, *x.shape[axis + 1 :])] * count


@shape_rule("SplitV")
def _split_v(node: Node) -> Shapes:
    x, sizes = node.inputs[0], sizes_in(node.inputs[1])
    axis = axis_in(node.inputs[2], x.rank)
    if axis is None or x.shape is None or not isinstance(sizes, tuple):
        return None
    rest = x.shape[axis] - total(s for s in sizes if s != -1)
    sizes = [rest if s == -1 else s for s in sizes]
    return [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes]


@shape_rule("Fill", "BroadcastTo")
def _filled(node: Node) -> Shape:
    sizes = sizes_in(node.inputs[0 if node.type == "Fill" else 1])
    return sizes if isinstance(sizes, tuple) and -1 not in sizes else None


@shape_rule(
    "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"
)
def _image_of_sizes(node: Node) -> Shape:
    sizes = sizes_in(node.inputs[0])
    return sizes if isinstance(sizes, tuple) and len(sizes) > 2 else None


@shape_rule("Empty", "ScatterNd")
def _of_sizes(node: Node) -> Shape:
    sizes = sizes_in(node.inputs[0 if node.type == "Empty" else 2])
    return sizes if isinstance(sizes, tuple) else None


@shape_rule("MirrorPadGrad")
def _unpad(node: Node) -> Shape:
    x, pads = node.inputs[0], sizes_in(node.inputs[1])
    if x.shape is None or not isinstance(pads, tuple):
        return None
    return tuple(size - total(p) for size, p in zip(x.shape, pads, strict=True))


@shape_rule("Unique", "UniqueV2")
def _distinct(node: Node) -> Shapes:
    return [None, node.inputs[0].shape if node.inputs[0].rank == 1 else None]


@shape_rule("MatrixSolve", "MatrixTriangularSolve")
def _solved(node: Node) -> Shape:
    matrix, right = (value.shape for value in node.inputs)
    if matrix is None or right is None or matrix[:-2] != right[:-2]:
        return None
    return right


@shape_rule("SelfAdjointEigV2")
def _eigen(node: Node) -> Shapes:
    shape = node.inputs[0].shape
    if shape is None:
        return None
    return [shape[:-1], shape if node.attr("compute_v") else None]


@shape_rule("Diag", "DiagPart")
def _tensor_diagonal(node: Node) -> Shape:
    shape = node.inputs[0].shape
    if shape is None:
        return None
    return (*shape, *shape) if node.type == "Diag" else shape[: len(shape) // 2]


@shape_rule("DynamicStitch")
def _stitched(node: Node) -> Shape:
    """Return the shape of parts that are put in their own order: 0, 1, 2, ..."""
    count = node.attr("N")
    (numbers,), (data,) = (
        (node.inputs[:count], node.inputs[count:]) if count == 1 else ((None,), (None,))
    )
    made = None if numbers is None else numbers.node
    if data is None or data.shape is None or made is None or made.type != "Range":
        return None
    start, limit, step = map(sizes_in, made.inputs)
    if start != 0 or step != 1 or numbers is None or numbers.rank != 1:
        return None
    return (limit, *data.shape[1:])


@shape_rule("Bitcast")
def _cast_bits(node: Node) -> Shape:
    """Return the shape of numbers that are taken for larger or smaller ones."""
    shape, (out,) = node.inputs[0].shape, node.outputs
    if shape is None:
        return None
    parts, left = divmod(node.inputs[0].dtype.size, out.dtype.size)
    if left or not parts:
        return shape[:-1]
    return shape if parts == 1 else (*shape, parts)


alike("InvertPermutation")
alike("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub")


@shape_rule("Tile")
def _tile(node: Node) -> Shape:
    x, times = node.inputs[0], sizes_in(node.inputs[1])
    if x.shape is None or not isinstance(times, tuple):
        return None
    return tuple(size * n for size, n in zip(x.shape, times, strict=True))


@shape_rule("Pad", "PadV2", "MirrorPad")
def _pad(node: Node) -> Shape:
    x, pads = node.inputs[0], sizes_in(node.inputs[1])
    if x.shape is None or not isinstance(pads, tuple):
        return None
    return tuple(size + total(p) for size, p in zip(x.shape, pads, strict=True))


@shape_rule("Slice")
def _slice(node: Node) -> Shapes:
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


@shape_rule("StridedSlice")
def _strided_slice(node: Node) -> Shapes:
    entries = entries_of(node)
    if entries is None:
        return None
    return [tuple(e.length for e in entries if e.out is not None)]


@shape_rule("StridedSliceGrad")
def _sliced_from(node: Node) -> Shape:
    sizes = sizes_in(node.inputs[0])
    return sizes if isinstance(sizes, tuple) else None


@shape_rule("GatherV2")
def _gather(node: Node) -> Shape:
    x, indices = node.inputs[:2]
    axis = axis_in(node.inputs[2], x.rank)
    if x.shape is None or indices.shape is None or axis is None:
        return None
    batch = node.attr("batch_dims") % max(len(indices.shape) + 1, 1)
    return (*x.shape[:axis], *indices.shape[batch:], *x.shape[axis + 1 :])


@shape_rule("ReadVariableOp")
def _read(node: Node) -> Shape:
    return tensorflow_names.shape_of_variable(node.inputs[0].source)


@shape_rule("ResourceGather")
def _look_up(node: Node) -> Shapes:
    indices = node.inputs[1].shape
    table = tensorflow_names.shape_of_variable(node.inputs[0].source)
    if indices is None or table is None or node.attr("batch_dims"):
        return None
    return (*indices, *table[1:])


@shape_rule("OneHot")
def _one_hot(node: Node) -> Shapes:
    x, depth = node.inputs[0], sizes_in(node.inputs[1])
    if x.shape is None:
        return None
    axis = node.attr("axis") % (len(x.shape) + 1)
    return (*x.shape[:axis], depth, *x.shape[axis:])


@shape_rule("Sum", "Mean", "Variance", "Max", "Min", "Prod", "All", "Any")
def _reduced(node: Node) -> Shape:
    x = node.inputs[0]
    axes = axes_in(node.inputs[1], x.rank)
    if x.shape is None or axes is None:
        return None
    if node.attr("keep_dims"):
        return tuple(1 if i in axes else size for i, size in enumerate(x.shape))
    return tuple(size for i, size in enumerate(x.shape) if i not in axes)


@shape_rule("ArgMax", "ArgMin")
def _arg(node: Node) -> Shape:
    x = node.inputs[0]
    axis = axis_in(node.inputs[1], x.rank)
    if x.shape is None or axis is None:
        return None
    return x.shape[:axis] + x.shape[axis + 1 :]


@shape_rule(
    "UnsortedSegmentSum",
    "UnsortedSegmentMax",
    "UnsortedSegmentMin",
    "UnsortedSegmentProd",
)
def _segments(node: Node) -> Shapes:
    x, numbers = (value.shape for value in node.inputs[:2])
    count = sizes_in(node.inputs[2])
    if x is None or numbers is None or count is None:
        return None
    return (count, *x[len(numbers) :])


@shape_rule("TopK", "TopKV2")
def _top(node: Node) -> Shapes:
    x = node.inputs[0].shape
    k = sizes_in(node.inputs[1]) if node.type == "TopKV2" else node.attr("k")
    if x is None or k is None:
        return None
    return [(*x[:-1], k)] * 2


@shape_rule("MatMul")
def _matmul(node: Node) -> Shapes:
    a, b = (v.shape for v in node.inputs)
    if a is None or b is None:
        return None
    return (
        a[1] if node.attr("transpose_a") else a[0],
        b[0] if node.attr("transpose_b") else b[1],
    )


@shape_rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _batch_matmul(node: Node) -> Shapes:
    a, b = (v.shape for v in node.inputs)
    if a is None or b is None:
        return None
    batch = broadcast([a[:-2], b[:-2]])
    if batch is None:
        return None
    rows = a[-1] if node.attr("adj_x") else a[-2]
    return (*batch, rows, b[-2] if node.attr("adj_y") else b[-1])


@shape_rule("SparseToDense")
def _dense(node: Node) -> Shapes:
    sizes = sizes_in(node.inputs[1])
    return sizes if isinstance(sizes, tuple) else None


@shape_rule("SparseTensorDenseMatMul")
def _sparse_matmul(node: Node) -> Shapes:
    a, b = sizes_in(node.inputs[2]), node.inputs[3].shape
    if not isinstance(a, tuple) or b is None:
        return None
    rows = a[1] if node.attr("adjoint_a") else a[0]
    return (rows, b[0] if node.attr("adjoint_b") else b[1])


def labels_of(node: Node) -> tuple[list[str], str] | None:
    """Return a letter for each axis of the operands of an ``Einsum``, and of what it makes."""
    equation = node.attr("equation").decode().replace(" ", "")
    left, out = equation.split("->")
    labels = left.split(",")
    if "..." in equation:
        spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
        counts = [
            (value.rank or 0) - len(label.replace("...", ""))
            for value, label in zip(node.inputs, labels, strict=True)
        ]
        dots = "".join(spare[: max(counts)])
        labels = [
            label.replace("...", dots[len(dots) - count :])
            for label, count in zip(labels, counts, strict=True)
        ]
        out = out.replace("...", dots)
    ranks = [value.rank for value in node.inputs]
    return (labels, out) if ranks == [len(label) for label in labels] else None


@shape_rule("Einsum")
def _einsum(node: Node) -> Shapes:
    found = labels_of(node)
    if found is None:
        return None
    labels, out = found
    sizes: dict[str, list[AnySize]] = {}
    for value, label in zip(node.inputs, labels, strict=True):
        assert value.shape is not None
        for letter, size in zip(label, value.shape, strict=True):
            sizes.setdefault(letter, []).append(size)
    named = node.attr("equation").decode()
    return [
        tuple(agreed(sizes[c], broadcasts=c not in named) for c in out)  # of "..."
    ]


@shape_rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def _cross_entropy(node: Node) -> Shapes:
    x, labels = (value.shape for value in node.inputs)
    is_sparse = node.type.startswith("Sparse")
    made = x if is_sparse else broadcast([x, labels])
    return None if made is None else [tuple(made[:1]), tuple(made)]


@shape_rule(
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


@shape_rule("StatelessMultinomial", "Multinomial")
def _classes(node: Node) -> Shape:
    x, count = node.inputs[0].shape, sizes_in(node.inputs[1])
    return None if x is None or count is None else (x[0], count)


@shape_rule("Range")
def _range(node: Node) -> Shapes:
    start, limit, delta = map(sizes_in, node.inputs)
    if start is None or limit is None or delta is None:
        return None
    if isinstance(delta, int) and delta > 0 and is_natural(limit - start):
        return (fraction(limit - start + delta - 1, delta),)
    return (quotient(limit - start, delta),)
