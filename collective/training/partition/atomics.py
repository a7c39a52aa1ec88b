"""What a GPU adds up in whatever order, made with the same bits by every rank.

A GPU adds up numbers that meet at one place, as the look-ups of one row of a table, by
atomic operations, whose order is another one each time; and cuDNN takes the algorithm that
was fastest when it was tried, on each rank. What is whole is made by each rank, or device,
and they would part by rounding. So sums of look-ups are made on the host, in order; of what
is dear, as the gradient of a convolution, all take what rank 0 has made.

TensorFlow lists such operations: those that ``tf.config.experimental.enable_op_determinism``
makes slower or refuses.
"""

from __future__ import annotations

import tensorflow as tf

from collective.tensorflow_ops.repeated_rows import added_once
from collective.training.keras_compat.tensorflow_names import (
    copy_operation,
    shape_of_variable,
)
from collective.training.partition.exchange import Exchange
from collective.training.partition.graph import Node

_SUMS = frozenset(
    {
        "UnsortedSegmentSum",
        "UnsortedSegmentProd",
        "SegmentSum",
        "SegmentSumV2",
        "SegmentMean",
        "ScatterNd",
        "TensorScatterAdd",
        "TensorScatterSub",
        "SparseTensorDenseMatMul",
    }
)
_INTO_A_VARIABLE = {
    "ResourceScatterAdd": None,  # by rows, each of which then comes once
    "ResourceScatterSub": None,
    "ResourceScatterNdAdd": tf.raw_ops.AssignAddVariableOp,
    "ResourceScatterNdSub": tf.raw_ops.AssignSubVariableOp,
}
_FAMILIES = [
    "Conv2D Conv2DBackpropFilter Conv2DBackpropInput",
    "Conv3D Conv3DBackpropFilterV2 Conv3DBackpropInputV2",
    "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput",
    "Dilation2DBackpropFilter Dilation2DBackpropInput",
    "MaxPoolGrad MaxPoolGradV2 MaxPool3DGrad MaxPoolGradWithArgmax",
    "BiasAddGrad",
    "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
    "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3",
    "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
    "ResizeBilinearGrad ResizeNearestNeighborGrad",
    "CropAndResizeGradImage CropAndResizeGradBoxes",
    "FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannelGradient",
    "CudnnRNNV3 CudnnRNNBackpropV3",
    "Bincount DenseBincount",
]
_DEAR = frozenset(name for family in _FAMILIES for name in family.split())
# On processors, too, where their threads add them up.
_ON_ALL_DEVICES = {
    "ResourceScatterAdd",
    "ResourceScatterSub",
    "DenseBincount",
    "CropAndResizeGradImage",
}
_CHEAP = _SUMS | {*_INTO_A_VARIABLE}
_HOST = "/device:CPU:0"


def parts_ranks(node: Node, exchange: Exchange) -> bool:
    """Return whether a node that every rank makes may have other bits on each."""
    return node.type in _CHEAP and _is_any_order(node, exchange)


def is_of_rank_zero(node: Node, exchange: Exchange) -> bool:
    """Return whether all take what rank 0 makes of a node, on its first device."""
    return node.type in _DEAR and _is_any_order(node, exchange)


def _is_any_order(node: Node, exchange: Exchange) -> bool:
    is_float = any(v.dtype.is_floating or v.dtype.is_complex for v in node.inputs)
    several = exchange.place[1] > 1 or len(exchange.devices) > 1
    # With an order of sums one process computes the same bits as several.
    if not is_float or not (several or exchange.tree is not None):
        return False
    return node.type in _ON_ALL_DEVICES or bool(tf.config.list_logical_devices("GPU"))


def on_host(node: Node, inputs: list[tf.Tensor]) -> tf.Operation:
    """Return the operation of a node, in which the sums are made on the host."""
    if node.type not in _INTO_A_VARIABLE:
        with tf.device(_HOST):
            return copy_operation(node.op, inputs)
    shape, rank = shape_of_variable(node.inputs[0].source), node.inputs[1].rank
    handle, indices, updates = inputs
    if not shape or rank is None:
        return copy_operation(node.op, inputs)
    if (write := _INTO_A_VARIABLE[node.type]) is not None:
        with tf.device(_HOST):
            change = tf.scatter_nd(indices, updates, tf.constant(shape, indices.dtype))
        return write(resource=handle, value=change)
    if len(shape) - 1 + rank != len(updates.shape):
        return copy_operation(node.op, inputs)  # a scalar, for all
    added = added_once(indices, tf.reshape(updates, [-1, *shape[1:]]))
    return copy_operation(node.op, [handle, *added])
