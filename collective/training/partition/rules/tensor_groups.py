"""Collectives among ranks that hold one replica together, each a part of large layers.

They have the same rows and compute with other weights, so a tensor of theirs has the
same layout over the replicas before and after: ``collective.backends.tensor_group``.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.backends.tensor_group import is_group
from collective.tensorflow_ops.naming import made_again
from collective.training.partition.graph import Node
from collective.training.partition.layouts import WHOLE, Layout, Sharded
from collective.training.partition.plans import Plan, Rows, rule, summed
from collective.training.partition.values import shape_rule


@rule("CollectiveAllReduce", "CollectiveAllGather")
def within_group(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Places stay where they are, but for the first axis of a gather."""
    if not is_group(node.attr("process_set")):
        return None
    *layouts, _ = summed(layouts)
    if node.type == "CollectiveAllGather" and _is_first(layouts[0]):
        return None

    def emit(emission: Any, inputs: list[Any]) -> tf.Operation:
        emission.traffic.in_groups += 1
        return made_again(node.op, inputs[:-1])

    return Plan([*layouts, None], [*layouts, WHOLE], emit)


def _is_first(layout: Layout) -> bool:
    return isinstance(layout, Sharded) and not layout.axis


@shape_rule("CollectiveAllReduce")
def _shapes_of_sums(node: Node) -> Any:
    return [*(value.shape for value in node.inputs[:-1]), ()]


@shape_rule("CollectiveAllGather")
def _shape_of_gather(node: Node) -> Any:
    (made, _), shape = node.outputs, node.inputs[0].shape
    known = made.static_shape()
    if shape is None or known is None:
        return None
    return [(known[0], *shape[1:]), ()]
