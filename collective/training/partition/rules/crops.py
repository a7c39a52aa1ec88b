"""Parts that boxes cut out of images, and the gradients of them.

A box names its image by number. Where box ``i`` names image ``i``, each replica has both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Node, Value, sizes_in
from collective.training.partition.layouts import ROWS, WHOLE, Layout, Shape, Sharded
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.values import shape_rule

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


def _counts_rows(value: Value, rows: Rows) -> bool:
    """Return whether a value is known to be 0, 1, 2, ... up to the last row."""
    node = value.node
    while node is not None and node.type in ("Cast", "Identity"):
        node = node.inputs[0].node
    if node is None or node.type != "Range":
        return False
    return [sizes_in(v) for v in node.inputs] == [0, rows.rows, 1]


def _has_a_row_each(images: Value, boxes: Value, numbers: Value, rows: Rows) -> bool:
    """Return whether there is a box for each image of the batch, in order."""
    return _counts_rows(numbers, rows) and all(
        value.shape is not None and value.shape[0] == rows.rows
        for value in (images, boxes)
    )


def _own_numbers(emission: Emission, numbers: tf.Tensor) -> tf.Tensor:
    """Return the numbers of images, among those of the replica."""
    return numbers - emission.scalar(emission.first_row, numbers.dtype)


@rule("CropAndResize")
def crop(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Crop each image by its box, or whole images of which each box takes a part."""
    layouts = summed(layouts)
    images, boxes, numbers = node.inputs[:3]
    if ROWS in layouts[:2] and _has_a_row_each(images, boxes, numbers, rows):

        def emit(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
            return emission.copy(node, [*x[:2], _own_numbers(emission, x[2]), x[3]])

        return Plan([ROWS, ROWS, ROWS, WHOLE], [ROWS], emit)
    layout = next((lay for lay in layouts[1:3] if isinstance(lay, Sharded)), None)
    if layout is None or layout.axis:
        return whole(node) if all(lay == WHOLE for lay in layouts) else None
    return Plan([WHOLE, layout, layout, WHOLE], [layout])


@shape_rule("CropAndResizeGradBoxes")
def _shape_of_boxes(node: Node) -> Shape:
    return node.inputs[2].shape


@shape_rule("CropAndResizeGradImage")
def _shape_of_images(node: Node) -> Shape:
    sizes = sizes_in(node.inputs[3])
    return sizes if isinstance(sizes, tuple) else None


@rule("CropAndResizeGradBoxes")
def gradient_of_boxes(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Make the gradient of each box by its own crop."""
    layouts = summed(layouts)
    _, images, boxes, numbers = node.inputs
    if all(lay == WHOLE for lay in layouts):
        return whole(node)
    if _has_a_row_each(images, boxes, numbers, rows):

        def emit(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
            return emission.copy(node, [*x[:3], _own_numbers(emission, x[3])])

        return Plan([ROWS] * 4, [ROWS], emit)
    layout = next((lay for lay in layouts[:1] if isinstance(lay, Sharded)), None)
    if layout is None or layout.axis:
        return None
    return Plan([layout, WHOLE, layout, layout], [layout])


@rule("CropAndResizeGradImage")
def gradient_of_images(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Make the gradient of each image by its own crop."""
    layouts, made = summed(layouts), node.outputs[0]
    _, boxes, numbers, _ = node.inputs
    if all(lay == WHOLE for lay in layouts):
        return whole(node)
    if not _has_a_row_each(made, boxes, numbers, rows):
        return None

    def emit(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
        sizes = emission.local_shape(x[3], ROWS, made.shape)
        return emission.copy(node, [*x[:2], _own_numbers(emission, x[2]), sizes])

    return Plan([ROWS, ROWS, ROWS, WHOLE], [ROWS], emit)
