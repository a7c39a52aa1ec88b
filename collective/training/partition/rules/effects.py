"""Variables, and what a step does besides computing."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.training.partition.graph import Node
from collective.training.partition.layouts import WHOLE, Layout
from collective.training.partition.propagation import Plan, Rows, rule, whole


@rule(
    "ReadVariableOp",
    "AssignVariableOp",
    "AssignAddVariableOp",
    "AssignSubVariableOp",
    "ResourceScatterAdd",
    "ResourceScatterSub",
    "ResourceScatterUpdate",
    "ResourceStridedSliceAssign",
    "VarIsInitializedOp",
    "VariableShape",
    "NoOp",
    "StatelessRandomGetKeyCounter",
    "StatelessRandomGetAlg",
    "StatelessRandomGetKeyCounterAlg",
    "RngSkip",
    "RngReadAndSkip",
    "BroadcastGradientArgs",
    "BroadcastArgs",
    "InvertPermutation",
)
def same_everywhere(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Every replica has all variables, and makes the same updates."""
    return whole(node)


@rule("Assert")
def watched(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Each replica looks at what it has."""
    shown = [value.layout for value in node.inputs[1:]]
    return Plan([WHOLE, *shown], [])


@rule(
    "Print",
    "PrintV2",
    "LogicalPrint",
    "WriteSummary",
    "WriteScalarSummary",
    "WriteHistogramSummary",
    "WriteImageSummary",
    "WriteRawProtoSummary",
    "WriteFile",
)
def on_rank_zero(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """What others see of a step: once."""
    if node.outputs:
        return whole(node)

    def emit(emission: Any, inputs: list[Any]) -> tf.Operation:
        def once() -> tf.Tensor:
            emission.copy(node, inputs)
            with tf.control_dependencies(
                tf.compat.v1.get_default_graph().get_operations()[-1:]
            ):
                return tf.constant(0)

        return tf.cond(emission.share.is_lead[0], once, lambda: tf.constant(0)).op

    return Plan([WHOLE] * len(layouts), [], emit)
