"""Reductions: over the sharded axis they give a partial value, over others they keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Node
from collective.training.partition.layouts import (
    SUM,
    WHOLE,
    Layout,
    Partial,
    Sharded,
)
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.sizes import product
from collective.training.partition.values import axes_in, axis_in

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

_KINDS = {
    "Sum": "sum",
    "Mean": "sum",
    "Max": "max",
    "Min": "min",
    "Prod": "prod",
    "All": "all",
    "Any": "any",
}
# Bytes; what is smaller travels with everything else that is summed.
_WORTH_A_GATHER = 1 << 16
_NARROW = (tf.float16, tf.bfloat16)


@rule(*_KINDS)
def reduction(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Reduce over all rows; each replica has a partial result."""
    x, layout = node.inputs[0], layouts[0]
    is_linear = node.type in ("Sum", "Mean") and x.dtype.is_floating
    if is_linear and layouts == [SUM, WHOLE]:
        return Plan(layouts, [SUM])
    layout, of_axes = summed(layouts)
    if not isinstance(layout, Sharded):
        return whole(node)
    axes = axes_in(node.inputs[1], x.rank)
    if axes is None or of_axes != WHOLE:
        return None
    keep = node.attr("keep_dims")
    if layout.axis not in axes:
        gone = 0 if keep else sum(axis < layout.axis for axis in set(axes))
        return Plan([layout, WHOLE], [layout.moved(layout.axis - gone)])
    if node.type != "Mean":
        return Plan([layout, WHOLE], [Partial(_KINDS[node.type])])
    if not (x.dtype.is_floating or x.dtype.is_complex) or x.shape is None:
        return None
    count = product(x.shape[axis] for axis in set(axes))

    def mean(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        values, over = inputs
        wide = tf.float32 if x.dtype in _NARROW else x.dtype
        total = tf.raw_ops.Sum(input=tf.cast(values, wide), axis=over, keep_dims=keep)
        return [tf.cast(total / emission.scalar(count, wide), x.dtype)]

    return Plan([layout, WHOLE], [SUM], mean)


@rule("L2Loss")
def l2_loss(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Sum squares."""
    (layout,) = summed(layouts)
    return Plan([layout], [SUM]) if isinstance(layout, Sharded) else whole(node)


@rule("ArgMax", "ArgMin")
def arg_max(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Find the place along an axis of each row."""
    layout = summed(layouts)[0]
    axis = axis_in(node.inputs[1], node.inputs[0].rank)
    if not isinstance(layout, Sharded):
        return whole(node)
    if axis is None or axis == layout.axis:
        return None
    return Plan([layout, WHOLE], [layout.moved(layout.axis - (axis < layout.axis))])


@rule("Bincount", "DenseBincount")
def bincount(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Count numbers: of each row, or as a sum over the rows."""
    layouts = summed(layouts)
    found = [lay for lay in (layouts[0], layouts[2]) if isinstance(lay, Sharded)]
    binary = node.type == "DenseBincount" and node.attr("binary_output")
    if not found:
        return whole(node)
    if found[0].axis or node.inputs[0].rank is None:
        return None
    of_weights = node.inputs[2].shape
    if of_weights is None:
        return None
    weights: Layout = WHOLE if 0 in of_weights else found[0]
    if weights != WHOLE and of_weights[0] != found[0].per_row * rows.rows:
        return None
    if node.type == "DenseBincount" and node.inputs[0].rank == 2:
        return Plan([found[0], WHOLE, weights], [found[0]])
    return None if binary else Plan([found[0], WHOLE, weights], [SUM])


@rule(
    "UnsortedSegmentSum",
    "UnsortedSegmentMax",
    "UnsortedSegmentMin",
    "UnsortedSegmentProd",
)
def segments(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Add rows up by their number: the gradient of look-ups."""
    layouts, (x, numbers, _) = summed(layouts), node.inputs
    if layouts[2] != WHOLE or numbers.rank is None or x.rank is None:
        return None
    found = [lay for lay in layouts[:2] if isinstance(lay, Sharded)]
    if not found:
        return whole(node)
    layout = found[0]
    kind = {"Sum": "sum", "Max": "max", "Min": "min", "Prod": "prod"}[
        node.type.removeprefix("UnsortedSegment")
    ]
    if layout.axis >= numbers.rank:  # within what a number names
        return Plan(
            [layout, WHOLE, WHOLE], [layout.moved(layout.axis - numbers.rank + 1)]
        )
    if node.type == "UnsortedSegmentSum" and _is_fewer(node, rows):
        return None  # the rows themselves are fewer bytes than what they are added to
    return Plan([layout, layout, WHOLE], [Partial(kind)])


def _is_fewer(node: Node, rows: Rows) -> bool:
    """Return whether the rows that are added are fewer than those that they are added to."""
    read, made = node.inputs[0].shape, node.outputs[0].shape
    if read is None or made is None or rows.expected is None:
        return False
    found = []
    for shape in (read, made):
        size = product(shape)
        if not isinstance(size, int):
            if size.symbols - getattr(rows.rows, "symbols", set()):
                return False
            size = sum(
                factor * rows.expected ** len(term)
                for term, factor in size.terms.items()
            )
        found.append(size)
    width = node.outputs[0].dtype.size
    return 2 * found[0] < found[1] and found[1] * width > _WORTH_A_GATHER
