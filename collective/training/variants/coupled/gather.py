"""The rows of all replicas together on each of them, in the order of the global batch.

Every backend can sum, so a gather is a sum: each replica puts its rows in their place
among zeros. ``x + 0`` is x in every dtype. Rows of one dtype travel as one matrix.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.errors import UsageError
from collective.tensorflow_ops.xla import not_compiled
from collective.training import keras_compat
from collective.training.variants.coupled.replica import ReplicaContext


def gather_rows(tree: Any, context: ReplicaContext, uses_of_all: bool = False) -> Any:
    """Gathers a tree of tensors; their Keras masks, too.

    Differentiable: the gradient of this replica's rows is that of their places in the
    result. It holds what *this* replica's use of the result owes to them.

    Args:
        tree: Tensors ``[n, ...]``, n rows of this replica; all dimensions but the first
            the same on every replica.
        uses_of_all: Whether the gradient holds what the uses of all replicas owe.

    Returns:
        The tree with tensors ``[global rows, ...]``.

    Raises:
        UsageError: A tensor has no rows, is ragged or sparse, or has a dtype that
            cannot be summed.
    """
    leaves = tf.nest.flatten(tree)
    tensors = [dense(leaf) for leaf in leaves]
    masks = [keras_compat.mask_of(leaf) for leaf in leaves]
    masked = [place for place, mask in enumerate(masks) if mask is not None]
    if context.replicas > 1:
        present = [tf.convert_to_tensor(masks[place]) for place in masked]
        gathered = _gather([*tensors, *present], context, uses_of_all)
        tensors = gathered[: len(tensors)]
        for place, mask in zip(masked, gathered[len(tensors) :], strict=True):
            keras_compat.set_mask(tensors[place], mask)
    return tf.nest.pack_sequence_as(tree, tensors)


def dense(leaf: Any) -> tf.Tensor:
    """A tensor with rows that can be gathered; others are refused."""
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        raise UsageError(
            f"rows of a {type(leaf).__name__} cannot be gathered for a loss or metric of "
            "the whole batch",
            hint="dense labels and predictions",
        )
    return tf.convert_to_tensor(leaf)


def _gather(
    tensors: list[tf.Tensor], context: ReplicaContext, uses_of_all: bool
) -> list[tf.Tensor]:
    own = [_own_rows(tensor, context) for tensor in tensors]
    by_carrier: dict[tf.DType, list[int]] = {}
    for place, tensor in enumerate(own):
        by_carrier.setdefault(carrier_of(tensor.dtype), []).append(place)
    matrices = [
        tf.concat([_as_matrix(own[i], carrier) for i in places], axis=1)
        for carrier, places in by_carrier.items()
    ]
    wholes = _gather_matrices(matrices, context, uses_of_all)
    results = list(own)
    for places, whole in zip(by_carrier.values(), wholes, strict=True):
        widths = [_width(own[i]) for i in places]
        for i, piece in zip(places, tf.split(whole, widths, axis=1), strict=True):
            results[i] = _from_matrix(piece, own[i])
    return results


def _gather_matrices(
    matrices: list[tf.Tensor], context: ReplicaContext, uses_of_all: bool
) -> list[tf.Tensor]:
    """Matrices ``[n, width]`` of this replica to ``[global rows, width]``."""
    start, rows = context.first_row, context.rows
    after = context.global_rows - start - rows

    @tf.custom_gradient
    def gathered(*matrices: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if uses_of_all:
                floats = [i for i, u in enumerate(upstream) if u.dtype.is_floating]
                own = [context.of_whole(context.own(upstream[i])) for i in floats]
                sums = dict(zip(floats, context.all_reduce(own), strict=True))
                upstream = tuple(sums.get(i, u) for i, u in enumerate(upstream))
            return [u[start : start + rows] for u in upstream]

        with not_compiled():
            padded = [tf.pad(m, [[start, after], [0, 0]]) for m in matrices]
        return context.all_reduce(padded), gradient

    return tf.nest.flatten(gathered(*matrices))


def _own_rows(tensor: tf.Tensor, context: ReplicaContext) -> tf.Tensor:
    """The tensor without the row that stands for none."""
    if tensor.shape.rank == 0:
        raise UsageError(
            "a scalar among predictions, labels or weights has no rows that could be "
            "gathered for a loss or metric of the whole batch",
            hint="return a value for each row from the model",
        )
    there = tf.shape(tensor, tf.int64)[0]
    expected = tf.maximum(context.rows, 1) if context.maybe_empty else context.rows
    fits = tf.debugging.assert_equal(
        there,
        expected,
        "a prediction, label or weight has another number of rows than the batch, and "
        "cannot be gathered for a loss or metric of the whole batch",
    )
    with tf.control_dependencies([fits]):
        return tensor[: context.rows] if context.maybe_empty else tf.identity(tensor)


def carrier_of(dtype: tf.DType) -> tf.DType:
    """The dtype in which every value of another travels exactly."""
    if dtype in (tf.float16, tf.bfloat16, tf.float32):
        return tf.float32
    if dtype == tf.float64:
        return tf.float64
    if dtype.is_integer or dtype.is_bool:
        return tf.int64
    raise UsageError(
        f"rows of dtype {dtype.name} cannot be gathered for a loss or metric of the "
        "whole batch",
        hint="map strings to numbers before the training: keras.layers.StringLookup",
    )


def _width(tensor: tf.Tensor) -> Any:
    """Elements of a row: an int where the shape says it."""
    width = tensor.shape[1:].num_elements()
    return tf.reduce_prod(tf.shape(tensor)[1:]) if width is None else width


def _as_matrix(tensor: tf.Tensor, carrier: tf.DType) -> tf.Tensor:
    shape = tf.stack([tf.shape(tensor)[0], _width(tensor)])
    matrix = tf.reshape(tensor, shape)
    if matrix.dtype == tf.uint64:
        return tf.bitcast(matrix, tf.int64)
    return tf.cast(matrix, carrier)


def _from_matrix(matrix: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """The values of a matrix in dtype and row shape of another tensor."""
    if like.dtype == tf.uint64:
        values = tf.bitcast(matrix, tf.uint64)
    else:
        values = tf.cast(matrix, like.dtype)
    shape = tf.concat([tf.shape(matrix)[:1], tf.shape(like)[1:]], axis=0)
    values = tf.reshape(values, shape)
    values.set_shape([None, *like.shape[1:]])
    return values
