"""Operations on each row alone: images, signals, matrices, distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Node, sizes_in
from collective.training.partition.layouts import SUM, WHOLE, Layout, Sharded
from collective.training.partition.plans import Plan, Rows, Rule, rule, summed, whole
from collective.training.partition.rules.empty import rows_wanted, with_a_row
from collective.training.partition.rules.products import contraction
from collective.training.partition.stateful import may_differ
from collective.training.partition.values import Shapes, alike, of_rows, shape_rule

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


def by_rows(inputs: Sequence[int] | None, kept: int | None) -> Rule:
    """Return the rule of an operation that works on each row alone.

    Args:
        inputs: The indices of the inputs that have rows, or None for all of them.
        kept: How many of the last axes belong together. If None, all but the first.
    """

    def of_rows(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
        layouts = summed(layouts)
        places = range(len(layouts)) if inputs is None else inputs
        places = [i for i in places if i < len(layouts)]
        found = [lay for i in places if isinstance(lay := layouts[i], Sharded)]
        if not found:
            return whole(node) if all(lay == WHOLE for lay in layouts) else None
        layout = found[0]
        ranks = [node.inputs[i].rank for i in places]
        if any(rank is None for rank in ranks):
            return None
        if kept is not None and len(set(ranks)) > 1:
            return None  # they broadcast, so that their first axes are not the same
        most = 0 if kept is None else (ranks[0] or 0) - kept - 1
        if layout.axis > most or any((rank or 0) <= layout.axis for rank in ranks):
            return None
        wanted: list[Layout] = [WHOLE] * len(layouts)
        for i in places:
            shape = node.inputs[i].shape
            assert shape is not None
            if (
                layouts[i] != layout
                and shape[layout.axis] != layout.per_row * rows.rows
            ):
                return None  # it would be broadcast
            wanted[i] = layout
        return Plan(wanted, [layout] * len(node.outputs))

    return of_rows


_FAMILIES: list[tuple[str, Sequence[int] | None, int | None]] = [
    ("Softmax LogSoftmax TopK TopKV2", [0], 1),
    ("BiasAdd", [0], None),
    ("SparseSoftmaxCrossEntropyWithLogits", [0, 1], None),
    ("SoftmaxCrossEntropyWithLogits", [0, 1], 1),
    ("Conv Dilation2D", [0], None),
    ("ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea", [0], None),
    ("ScaleAndTranslate", [0], None),
    ("ResizeBilinearGrad ResizeBicubicGrad", [0, 1], None),
    ("ScaleAndTranslateGrad", [0, 1], None),
    ("ResizeNearestNeighborGrad", [0], None),
    ("AdjustContrastv2 AdjustHue AdjustSaturation RGBToHSV HSVToRGB", [0], 3),
    ("ExtractImagePatches ExtractVolumePatches", [0], None),
    ("DepthToSpace SpaceToDepth", [0], None),
    ("FFT IFFT RFFT IRFFT", [0], 1),
    ("FFT2D IFFT2D RFFT2D IRFFT2D", [0], 2),
    ("FFT3D IFFT3D RFFT3D IRFFT3D", [0], 3),
    ("Cholesky CholeskyGrad MatrixInverse MatrixDeterminant Qr Svd Lu", None, 2),
    ("SelfAdjointEigV2 Eig LogMatrixDeterminant MatrixSquareRoot", None, 2),
    ("MatrixLogarithm MatrixExponential", None, 2),
    ("MatrixSolve MatrixSolveLs TridiagonalSolve", [0, 1], 2),
    ("NthElement", [0], 1),
    ("DrawBoundingBoxesV2", [0, 1], None),
    ("CombinedNonMaxSuppression", [0, 1], None),
    ("Cross", [0, 1], 1),
    ("FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel", [0], 1),
]
for _types, _inputs, _kept in _FAMILIES:
    rule(*_types.split())(by_rows(_inputs, _kept))
    of_rows(*_types.split(), behind=_kept or 0)


# oneDNN's result of no image has the channels of the input, or there is none; cuDNN
# refuses some of no image, and the kernel of InTopK for GPUs ends the process.
_WITH_ROWS: list[tuple[str, Sequence[int]]] = [
    ("Conv2D Conv3D DepthwiseConv2dNative", [0]),
    ("MaxPool MaxPoolV2 MaxPool3D", [0]),
    ("MaxPoolGrad MaxPoolGradV2 MaxPool3DGrad", [0, 1, 2]),
    ("AvgPool AvgPool3D LRN", [0]),
    ("LRNGrad", [0, 1, 2]),
    ("InTopK InTopKV2", [0, 1]),
    ("MaxPoolGradGrad MaxPoolGradGradV2 MaxPool3DGradGrad", [0, 1, 2]),
]
for _types, _inputs in _WITH_ROWS:
    rule(*_types.split())(rows_wanted(by_rows(_inputs, None)))
    of_rows(*_types.split())


alike(
    *[
        "Softmax",
        "LogSoftmax",
        "BiasAdd",
        "AdjustContrastv2",
        "AdjustHue",
    ]
)
alike(*["AdjustSaturation", "RGBToHSV", "HSVToRGB", "Cholesky", "MatrixInverse", "LRN"])
alike("Cross")
alike(*["MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradV2", "LRNGrad"])
alike("MaxPoolGradWithArgmax", "DrawBoundingBoxesV2")


@rule("MatrixTriangularSolve", "BandedTriangularSolve")
def triangular_solve(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Solve for each column alone; matrices and right sides broadcast."""
    layouts = summed(layouts)
    of_matrix, of_right = (value.rank for value in node.inputs)
    if of_matrix is None or of_right is None or max(of_matrix, of_right) > 10:
        return None
    batch = "abcdefgh"[: max(of_matrix, of_right) - 2]
    labels = [
        batch[len(batch) + 2 - of_matrix :] + "ij",
        batch[len(batch) + 2 - of_right :] + "jk",
    ]
    for layout, label in zip(layouts, labels, strict=True):
        if isinstance(layout, Sharded) and label[layout.axis] in "ij":
            return None
    plan = contraction(node, layouts, rows, labels, batch + "ik", repeated=batch)
    # A band of ones can be solved for.
    return with_a_row(plan, node, {0: 1}) if node.type.startswith("Band") else plan


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def projective(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Transform images, each by a transform of its own, or all by one."""
    layouts = summed(layouts)
    layout = next((lay for lay in layouts[:2] if isinstance(lay, Sharded)), None)
    transforms = node.inputs[1].shape
    if layout is None or layout.axis or transforms is None:
        return None if layout else whole(node)
    rest = [WHOLE] * (len(layouts) - 2)
    one = transforms[0] == 1
    return Plan([layout, WHOLE if one else layout, *rest], [layout])


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused_norm(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Normalize with given statistics; the batch's own are computed from sums elsewhere."""
    layouts = summed(layouts)
    layout = layouts[0]
    if not isinstance(layout, Sharded):
        return whole(node)
    if node.attr("is_training") or layout.axis:
        return None
    rest = [WHOLE] * (len(layouts) - 1)
    return Plan([layout, *rest], [layout, *[WHOLE] * (len(node.outputs) - 1)])


def _with_shape(place: int, grads: Sequence[int]) -> Rule:
    """Return the gradient of an input, whose shape is one of the operands."""

    def backward(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
        layouts = summed(layouts)
        layout = layouts[grads[0]]
        if not isinstance(layout, Sharded):
            return whole(node) if all(lay == WHOLE for lay in layouts) else None
        if layout.axis or layouts[place] != WHOLE:
            return None
        wanted: list[Layout] = [WHOLE] * len(layouts)
        for i in grads:
            wanted[i] = layout

        def emit(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
            x = list(x)
            if node.inputs[place].shape != (2,):  # of height and width alone
                shape = sizes_in(node.inputs[place])
                x[place] = emission.local_shape(x[place], layout, shape)
            return list(emission.copy(node, x))

        return Plan(wanted, [layout], emit)

    return backward


@rule("MaxPoolWithArgmax", "MaxPoolGradWithArgmax")
def largest(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Take the largest number of each window, and its place in the image of its row."""
    if node.attr("include_batch_in_index"):
        return None
    return _windows(node, layouts, rows)


_windows = rows_wanted(by_rows(None, None))
of_rows("MaxPoolWithArgmax")


@rule("FractionalMaxPool", "FractionalAvgPool")
def fractional_pool(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Pool each image by the same regions, which a seed gives on every replica."""
    if not may_differ(node):
        plan = _images(node, layouts, rows)
        if plan is None or not isinstance(plan.outputs[0], Sharded):
            return plan
        return with_a_row(Plan(plan.inputs, [plan.outputs[0], WHOLE, WHOLE]), node)

    def drawn(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
        pooled, *regions = emission.copy(node, x)
        # TensorFlow says that they are one shorter than they are.
        default = tf.compat.v1.placeholder_with_default
        return [pooled, *(default(bounds, [None]) for bounds in regions)]

    return Plan([WHOLE], [WHOLE] * 3, drawn, is_fallback=True, is_of_rank_zero=True)


_images = by_rows([0], None)


@shape_rule("FractionalMaxPool", "FractionalAvgPool")
def _pooled(node: Node) -> Shapes:
    images, pooled = node.inputs[0].shape, node.outputs[0].static_shape()
    if images is None or pooled is None:
        return None
    return [(images[0], *pooled[1:]), None, None]


rule("FractionalMaxPoolGrad")(rows_wanted(by_rows([0, 1, 2], None)))
alike("FractionalMaxPoolGrad")
rule("FractionalAvgPoolGrad")(_with_shape(0, [1]))
rule("Conv2DBackpropInput", "Conv3DBackpropInputV2")(_with_shape(0, [2]))
rule("DepthwiseConv2dNativeBackpropInput")(_with_shape(0, [2]))
rule("AvgPoolGrad", "AvgPool3DGrad")(_with_shape(0, [1]))


@rule(
    "Conv2DBackpropFilter",
    "Conv3DBackpropFilterV2",
    "DepthwiseConv2dNativeBackpropFilter",
)
def filter_gradient(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Sum the gradient over the rows."""
    layouts = summed(layouts)
    found = [lay for lay in (layouts[0], layouts[2]) if isinstance(lay, Sharded)]
    if not found:
        return whole(node)
    if found[0].axis:
        return None
    return with_a_row(Plan([found[0], WHOLE, found[0]], [SUM]), node)


@rule("Dilation2DBackpropFilter")
def dilation_filter(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Sum the gradient by the filter over the rows."""
    layouts = summed(layouts)
    found = [lay for lay in (layouts[0], layouts[2]) if isinstance(lay, Sharded)]
    if not found or found[0].axis:
        return None if found else whole(node)
    return Plan([found[0], WHOLE, found[0]], [SUM])


rule("Dilation2DBackpropInput")(by_rows([0, 2], None))


@rule("BiasAddGrad")
def bias_gradient(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Sum over all axes but that of the channels."""
    layout, rank = summed(layouts)[0], node.inputs[0].rank
    if not isinstance(layout, Sharded) or rank is None:
        return whole(node)
    channel = 1 if node.attr("data_format") == b"NCHW" else rank - 1
    return Plan([layout], [layout.moved(0) if layout.axis == channel else SUM])


@rule(
    "FakeQuantWithMinMaxVarsGradient",
    "FakeQuantWithMinMaxVarsPerChannelGradient",
)
def fake_quant_gradient(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Work on each number alone; the gradients of the bounds are sums."""
    layouts = summed(layouts)
    found = [lay for lay in layouts[:2] if isinstance(lay, Sharded)]
    if not found:
        return whole(node)
    if node.type.endswith("PerChannelGradient"):
        rank = node.inputs[0].rank
        if rank is None or found[0].axis == rank - 1:
            return None
    return Plan([found[0], found[0], WHOLE, WHOLE], [found[0], SUM, SUM])


_ROUNDED = [f"QuantizeAndDequantizeV{number}" for number in (2, 3, 4)]
alike(*_ROUNDED)


@rule(*_ROUNDED)
def rounded(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Round each number to one of a given range; else the range is that of all rows."""
    layouts = summed(layouts)
    if not isinstance(layouts[0], Sharded):
        return whole(node) if all(lay == WHOLE for lay in layouts) else None
    if not node.attr("range_given") or node.attr("axis") == layouts[0].axis:
        return None
    return Plan([layouts[0], *[WHOLE] * (len(layouts) - 1)], [layouts[0]])


@shape_rule("QuantizeAndDequantizeV4Grad")
def _of_rounded(node: Node) -> Shapes:
    return [value.shape for value in node.inputs[1:]]


@rule("QuantizeAndDequantizeV4Grad")
def rounded_gradient(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Make the gradient of each number; those of the bounds are sums."""
    layouts = summed(layouts)
    layout = next((lay for lay in layouts[:2] if isinstance(lay, Sharded)), None)
    if layout is None:
        return whole(node) if all(lay == WHOLE for lay in layouts) else None
    if node.attr("axis") == layout.axis:
        return None
    return Plan([layout, layout, WHOLE, WHOLE], [layout, SUM, SUM])


@rule("SpaceToBatchND", "BatchToSpaceND", "SpaceToBatch", "BatchToSpace")
def space_to_batch(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Make a batch of each part of the images, one after the other."""
    layout, sizes = summed(layouts)[0], sizes_in(node.inputs[1])
    if not isinstance(layout, Sharded):
        return whole(node)
    if layout.axis or node.type not in ("SpaceToBatchND", "BatchToSpaceND"):
        return None
    if not isinstance(sizes, tuple) or not all(isinstance(s, int) for s in sizes):
        return None
    count = 1
    for size in sizes:
        count *= size
    if node.type == "SpaceToBatchND":
        made = Sharded(0, layout.blocks * count)
    else:
        part = layout.blocks[: len(layout.blocks) // count]
        if part * count != layout.blocks:
            return None
        made = Sharded(0, part)
    return Plan([layout, WHOLE, WHOLE], [made])
