"""Ragged and sparse tensors of a batch, whole on every rank.

Their rows lie in vectors of no known length, for which operations have no rules. So they
are gathered as they come in, and what is computed of them alone is computed whole.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.training.partition.exchange import Exchange


def gathered(
    tensor: Any, first: tf.Tensor, total: tf.Tensor, exchange: Exchange
) -> Any:
    """Return the rows of all ranks.

    Args:
        tensor: The rows of this rank, a ``RaggedTensor`` or ``SparseTensor``.
        first: int64 scalar, the place of its first row in the batch.
        total: int64 scalar, the rows of the batch.
    """
    if isinstance(tensor, tf.RaggedTensor):
        lengths = [exchange.gather(n) for n in tensor.nested_row_lengths()]
        values = exchange.gather(tensor.flat_values)
        return tf.RaggedTensor.from_nested_row_lengths(values, lengths, validate=False)
    moved = tf.concat([tensor.indices[:, :1] + first, tensor.indices[:, 1:]], 1)
    shape = tf.concat([total[None], tensor.dense_shape[1:]], 0)
    indices, values = exchange.gather(moved), exchange.gather(tensor.values)
    return tf.SparseTensor(indices, values, shape)


def rows_of(leaf: Any, first: tf.Tensor, count: tf.Tensor) -> Any:
    """Return the rows of this rank of a whole ragged or sparse tensor; others as they are."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf[first : first + count]
    if isinstance(leaf, tf.SparseTensor):
        begin = tf.concat([first[None], tf.zeros_like(leaf.dense_shape[1:])], 0)
        size = tf.concat([count[None], leaf.dense_shape[1:]], 0)
        return tf.sparse.slice(leaf, begin, size)
    return leaf
