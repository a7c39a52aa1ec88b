"""Channels of images that are cut over a model axis: convolutions, pools, biases.

A convolution is a contraction over its input channels, so it is cut along those of its
input or of its output as a product of matrices is. Places of an image are never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Node, Value, sizes_in
from collective.training.partition.layouts import WHOLE, Layout, Sharded
from collective.training.partition.plans import (
    AXIS_RULES,
    Plan,
    Rows,
    Rule,
    rule,
    summed,
)
from collective.training.partition.rules.products import contracted

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

_PLACES = "xyz"


def _image(node: Node, rank: int, channel: str, places: str) -> str:
    """Return the letters of an image's axes; those of channels come first or last."""
    behind = node.attr("data_format").startswith(b"NC")
    inner = places[: rank - 2]
    return "n" + (channel + inner if behind else inner + channel)


def _letters(node: Node, rank: int) -> tuple[str, str, str]:
    """Return the letters of a convolution's image, kernel and result."""
    kernel = "abc"[: rank - 2] + "io"
    return (
        _image(node, rank, "i", _PLACES),
        kernel,
        _image(node, rank, "o", _PLACES.upper()),
    )


def _convolution(operands: str, result: str, shape: int | None = None) -> Rule:
    """Return the rule of a convolution or of one of its gradients.

    Args:
        operands: Which of I(mage), K(ernel) and O(utput) are its operands, in order.
        result: Which it makes.
        shape: The operand that is the shape of the result.
    """

    def plan(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
        values = [v for i, v in enumerate(node.inputs) if i != shape]
        rank = values[0].rank
        if rank is None:
            return None
        labels = dict(zip("IKO", _letters(node, rank), strict=True))
        taken = summed([lay for i, lay in enumerate(layouts) if i != shape])
        given = [labels[operand] for operand in operands]
        letters = {
            label[lay.axis]
            for label, lay in zip(given, taken, strict=True)
            if isinstance(lay, Sharded)
        }
        if not letters or letters - set("io") or _is_grouped(node, labels, operands):
            return None
        made = contracted(values, taken, rows, given, labels[result])
        if made is None or shape is None:
            return made
        return _with_shape(node, made, shape)

    return plan


def _is_grouped(node: Node, labels: dict[str, str], operands: str) -> bool:
    """Return whether each output channel sees some of the input channels alone."""
    operand = dict(zip(operands, [v for v in node.inputs if v.rank != 1], strict=True))
    made = {name: v.shape for name, v in operand.items()}
    made.setdefault(next(n for n in "IKO" if n not in operand), node.outputs[0].shape)
    image, kernel = made["I"], made["K"]
    if image is None or kernel is None:
        return True
    return image[labels["I"].index("i")] != kernel[labels["K"].index("i")]


def _with_shape(node: Node, made: Plan, shape: int) -> Plan:
    """Add the operand that is the shape of the result, of which a replica has a part."""
    wanted, (layout,) = list(made.inputs), made.outputs
    wanted.insert(shape, WHOLE)

    def emit(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
        x = list(x)
        if node.inputs[shape].shape != (2,):  # of height and width alone
            known = sizes_in(node.inputs[shape])
            x[shape] = emission.local_shape(x[shape], layout, known)
        return list(emission.copy(node, x))

    return Plan(wanted, made.outputs, emit)


for _type in ("Conv2D", "Conv3D"):
    rule(_type, table=AXIS_RULES)(_convolution("IK", "O"))
for _type in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):
    rule(_type, table=AXIS_RULES)(_convolution("KO", "I", shape=0))
for _type in ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"):
    rule(_type, table=AXIS_RULES)(_convolution("IO", "K", shape=1))


def _channel_of(node: Node, rank: int) -> int:
    return 1 if node.attr("data_format").startswith(b"NC") else rank - 1


_DEPTHWISE: dict[str, tuple[str, str, int | None]] = {
    "DepthwiseConv2dNative": ("IK", "O", None),
    "DepthwiseConv2dNativeBackpropInput": ("KO", "I", 0),
    "DepthwiseConv2dNativeBackpropFilter": ("IO", "K", 1),
}


@rule(*_DEPTHWISE, table=AXIS_RULES)
def depthwise(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Apply the kernel that each channel has of its own, of several outputs side by side."""
    operands, result, shape = _DEPTHWISE[node.type]
    places = [i for i in range(len(layouts)) if i != shape]
    layouts = summed(layouts)
    of = dict(zip(operands, places, strict=True))
    kernel = node.outputs[0] if result == "K" else node.inputs[of["K"]]
    if kernel.shape is None or not isinstance(kernel.shape[3], int):
        return None
    many, channel = kernel.shape[3], _channel_of(node, 4)
    found = []  # the layout of the input channels, by each operand
    for operand, place in of.items():
        layout = layouts[place]
        if not isinstance(layout, Sharded):
            continue
        blocks = layout.blocks
        if operand == "O":
            if any(not isinstance(k, int) or k % many for k in blocks):
                return None
            blocks = tuple(k // many for k in blocks if isinstance(k, int))
        if layout.axis != (2 if operand == "K" else channel):
            return None
        found.append(Sharded(0, blocks))
    if not found:
        return None
    chosen = found[0]
    by_name = {
        "I": chosen.moved(channel),
        "K": chosen.moved(2),
        "O": Sharded(channel, tuple(k * many for k in chosen.blocks)),
    }
    made = Plan([by_name[operand] for operand in operands], [by_name[result]])
    return made if shape is None else _with_shape(node, made, shape)


def _each_channel(images: Sequence[int], shape: int | None = None) -> Rule:
    """Return the rule of what treats each channel alone.

    Args:
        images: Operands that have the channels; others are whole.
        shape: The operand that is the shape of the result.
    """

    def plan(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
        layouts, rank = summed(layouts), node.inputs[images[0]].rank
        found = [layouts[i] for i in images if isinstance(layouts[i], Sharded)]
        if not found or rank is None:
            return None
        layout, channel = found[0], rank - 1
        if "data_format" in node.op.node_def.attr:
            channel = _channel_of(node, rank)
        if not isinstance(layout, Sharded) or layout.axis != channel:
            return None
        wanted: list[Layout] = [
            layout if i in images else WHOLE for i in range(len(layouts))
        ]
        if shape is None:
            return Plan(wanted, [layout] * len(node.outputs))
        made = Plan([w for i, w in enumerate(wanted) if i != shape], [layout])
        return _with_shape(node, made, shape)

    return plan


for _types, _images in (
    ("MaxPool MaxPoolV2 MaxPool3D AvgPool AvgPool3D", [0]),
    ("MaxPoolGrad MaxPoolGradV2 MaxPool3DGrad", [0, 1, 2]),
    ("ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea", [0]),
    ("ResizeBilinearGrad ResizeBicubicGrad", [0, 1]),
    ("ResizeNearestNeighborGrad", [0]),
):
    rule(*_types.split(), table=AXIS_RULES)(_each_channel(_images))
rule("AvgPoolGrad", "AvgPool3DGrad", table=AXIS_RULES)(_each_channel([1], shape=0))


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", table=AXIS_RULES)
def fused_norm(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Normalize each channel by statistics of its own."""
    layout, channel = _of_channels(node, layouts, 0)
    if layout is None:
        return None
    each = layout.moved(0)
    wanted: list[Layout] = [
        layout.moved(channel) if not i else (each if _is_vector(value) else WHOLE)
        for i, value in enumerate(node.inputs)
    ]
    outputs: list[Layout] = [layout.moved(channel), *[each] * 4]
    return Plan(wanted, [*outputs, *[WHOLE] * 9][: len(node.outputs)])


def _is_vector(value: Value) -> bool:
    """Return whether it has a number for each channel; statistics may be empty."""
    return value.shape is None or value.shape != (0,)


@rule("BiasAdd", table=AXIS_RULES)
def bias_add(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Add a number to each channel."""
    layout, channel = _of_channels(node, layouts, 0, 1)
    if layout is None:
        return None
    return Plan([layout.moved(channel), layout.moved(0)], [layout.moved(channel)])


def _of_channels(
    node: Node, layouts: Sequence[Layout], image: int, vector: int | None = None
) -> tuple[Sharded | None, int]:
    """Return how channels are cut of an image, or of a vector beside it; and their axis."""
    rank = node.inputs[image].rank
    if rank is None:
        return None, 0
    layouts, channel = summed(layouts), _channel_of(node, rank)
    of_image = layouts[image]
    if isinstance(of_image, Sharded):
        return (of_image if of_image.axis == channel else None), channel
    of_vector = None if vector is None else layouts[vector]
    return (of_vector if isinstance(of_vector, Sharded) else None), channel
