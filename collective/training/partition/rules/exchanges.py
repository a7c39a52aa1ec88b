"""Exchanges along an axis of the mesh that an earlier pass has left in the graph.

The ranks of such an axis have the same rows, so places stay where they are. See
``collective.training.partition.markers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Node
from collective.training.partition.layouts import SUM, Layout, Sharded
from collective.training.partition.plans import Plan, Rows, rule, summed
from collective.training.partition.values import Shapes, shape_rule

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


def _exchanged(
    node: Node, taken: Sequence[Layout | None], made: Sequence[Layout]
) -> Plan:
    def emit(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        assert node.marker is not None
        return list(emission.pending.of_marker(node.marker, node.op, inputs))

    return Plan(taken, made, emit)


@rule("MarkedSum")
def marked_sum(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Sum along two axes in any order."""
    taken = [
        layout if layout == SUM and value.dtype.is_floating else summed([layout])[0]
        for value, layout in zip(node.inputs, layouts, strict=True)
    ]
    return _exchanged(node, taken, taken)


@rule("MarkedReduction", "MarkedFirst")
def marked_reduction(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Work on each element alone."""
    taken = summed(layouts)
    return _exchanged(node, taken, taken)


@rule("MarkedGather")
def marked_gather(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Join along the first axis, where no rows may be."""
    *parts, axis = summed(layouts)
    if isinstance(parts[0], Sharded) and not parts[0].axis:
        return None
    return _exchanged(node, [*parts, axis], [parts[0]])


@shape_rule("MarkedSum", "MarkedReduction", "MarkedFirst")
def _as_given(node: Node) -> Shapes:
    return [value.shape for value in node.inputs]


@shape_rule("MarkedGather")
def _joined(node: Node) -> Shapes:
    shape = node.inputs[0].shape
    if shape is None:
        return None
    return (shape[0] * (len(node.inputs) - 1), *shape[1:])
