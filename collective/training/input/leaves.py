"""Rows of a tensor, be it dense, ragged or sparse; all have them in the first axis."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def first_leaf(tree: Any) -> Any:
    """Return a tensor of the tree, to ask for the number of rows."""
    return present(tree)[0]


def present(tree: Any) -> list[Any]:
    """Return the tensors of a tree that may have None in it."""
    return [leaf for leaf in tf.nest.flatten(tree) if leaf is not None]


def count_rows(leaf: Any) -> tf.Tensor:
    """Return the number of rows of one tensor: int64 scalar."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(tf.int64)
    return tf.shape(leaf, tf.int64)[0]


def slice_leaf(leaf: Any, start: Any, stop: Any) -> Any:
    """Return rows ``start`` to ``stop`` of one tensor."""
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
    rest = leaf.dense_shape[1:]
    begin = tf.concat([[start], tf.zeros_like(rest)], 0)
    rows = tf.sparse.slice(leaf, begin, tf.concat([[stop - start], rest], 0))
    # TensorFlow forgets what is known of the shape.
    known = [
        leaf.dense_shape[axis] if size is None else tf.constant(size, tf.int64)
        for axis, size in enumerate(leaf.shape)
    ]
    shape = tf.stack([stop - start, *known[1:]])
    return tf.SparseTensor(rows.indices, rows.values, shape)


def open_rows(spec: Any) -> Any:
    """Return the specification of a tensor with any number of such rows as it has."""
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = [None, *spec.shape[1:]]
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def checksum(tree: Any) -> tf.Tensor:
    """Return 48 bits of a checksum of a tree's tensors, with their shapes: int64 scalar."""
    marks = [tf.zeros([1, 8], tf.uint8)]
    for leaf in tf.nest.flatten(present(tree), expand_composites=True):
        marks.append(tf.fingerprint(_bytes(tf.shape(leaf, tf.int64))))
        marks.append(tf.fingerprint(_bytes(leaf)))
    mark = tf.fingerprint(tf.reshape(tf.concat(marks, 0), [1, -1]))[0]
    weights = tf.constant([1 << 8 * place for place in range(6)], tf.int64)
    return tf.reduce_sum(tf.cast(mark[:6], tf.int64) * weights)


def _bytes(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor's bytes: uint8 ``[1, n]``."""
    if tensor.dtype == tf.string:
        tensor = tf.strings.to_hash_bucket_fast(tensor, (1 << 63) - 1)
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    return tf.reshape(tf.bitcast(tf.reshape(tensor, [-1]), tf.uint8), [1, -1])
