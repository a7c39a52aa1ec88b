"""Copies of operations, compiled by XLA if XLA alone makes the same of them.

The partition takes a function apart that XLA compiles whole (``jit_compile=True``), and its
operations run as TensorFlow's own. A few have no kernel for that: Keras compiles a
convolution in groups because TensorFlow has no gradient of it for a CPU. And XLA draws other
random numbers from the same key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from collective.training.keras_compat.tensorflow_names import copy_operation
from collective.training.partition.graph import Node

_NEED_XLA = ("Xla", "StatelessRandom", "StatelessTruncated")
_CONVOLUTIONS = ("Conv2D", "Conv3D")


def needs_xla(node: Node) -> bool:
    """Return whether XLA compiles the copies of a node."""
    if not node.is_compiled:
        return False
    kind = str(node.op.type)
    return kind.startswith(_NEED_XLA) or _is_in_groups(node, kind)


def _is_in_groups(node: Node, kind: str) -> bool:
    """Return whether it is a convolution in groups, or a gradient of one."""
    if not kind.startswith(_CONVOLUTIONS):
        return False
    image, kernel = node.inputs[0], node.inputs[1]
    if "BackpropInput" in kind:
        image = node.outputs[0]
    elif "BackpropFilter" in kind:
        kernel = node.outputs[0]
    if not image.shape or not kernel.shape:
        return True
    place = 1 if node.attr("data_format").startswith(b"NC") else -1
    return image.shape[place] != kernel.shape[-2]


def copied(
    node: Node,
    inputs: Sequence[tf.Tensor],
    attributes: Mapping[str, attr_value_pb2.AttrValue] | None = None,
) -> tf.Operation:
    """Copy the operation of a node into the graph that is being traced, with other inputs.

    Args:
        attributes: The attributes that the copy does not have in common.

    Returns:
        An operation with the same outputs, in their order.
    """
    if not needs_xla(node):
        return copy_operation(node.op, inputs, attributes)

    def run(*given: tf.Tensor) -> list[tf.Tensor]:
        return list(copy_operation(node.op, given, attributes).outputs)

    outputs = tf.function(run, jit_compile=True, autograph=False)(*inputs)
    return outputs[0].op
