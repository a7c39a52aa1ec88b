"""Copies of operations, compiled by XLA if only XLA can make them.

The partition takes a function apart that XLA compiles whole (``jit_compile=True``), and its
operations run as TensorFlow's own. A few have no kernel for that: Keras compiles a
convolution in groups because TensorFlow has no gradient of it for a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from collective.training.keras_compat.tensorflow_names import copy_operation
from collective.training.partition.graph import Node

_NEED_XLA = ("Conv2D", "Conv3D", "Xla")


def copied(
    node: Node,
    inputs: Sequence[tf.Tensor],
    attributes: Mapping[str, attr_value_pb2.AttrValue] | None = None,
) -> tf.Operation:
    """Copy the operation of a node into the graph that is being traced, with other inputs.

    Args:
        attributes: The attributes that the copy does not have in common.

    Returns:
        What has the outputs of the operation, in their order.
    """
    if not node.is_compiled or not node.op.type.startswith(_NEED_XLA):
        return copy_operation(node.op, inputs, attributes)

    def run(*given: tf.Tensor) -> list[tf.Tensor]:
        return list(copy_operation(node.op, given, attributes).outputs)

    outputs = tf.function(run, jit_compile=True, autograph=False)(*inputs)
    return outputs[0].op
