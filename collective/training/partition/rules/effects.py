"""Variables, and what a step does besides computing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.keras_compat.tensorflow_names import copy_operation
from collective.training.partition.graph import Node
from collective.training.partition.layouts import WHOLE, Layout
from collective.training.partition.plans import Made, Plan, Rows, rule, whole
from collective.training.partition.stateful import SHOWN

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


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
    """Make the same updates on every replica, which has all variables."""
    return whole(node)


@rule("Assert")
def watched(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Let each replica look at what it has."""
    shown = [value.layout for value in node.inputs[1:]]
    return Plan([WHOLE, *shown], [])


@rule(*SHOWN)
def on_rank_zero(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Do on rank 0, once, what others see of a step, such as a line of text.

    What follows such an operation follows a branch that all ranks have, so the order of
    several effects stays.
    """
    passed = list(layouts[: len(node.outputs)])  # of Print, which returns its input
    rest = [WHOLE] * (len(layouts) - len(passed))

    def emit(emission: Emission, inputs: list[tf.Tensor]) -> Made:
        given = [tf.identity(x) for x in inputs[: len(passed)]]
        if emission.replica:
            return given

        def shown() -> tf.Tensor:
            with tf.control_dependencies([copy_operation(node.op, inputs)]):
                return tf.constant(True)

        done = tf.cond(emission.share.is_lead[0], shown, lambda: tf.constant(False))
        with tf.control_dependencies([done]):
            return [tf.identity(x) for x in given] or tf.no_op()

    return Plan([*passed, *rest], passed, emit)
