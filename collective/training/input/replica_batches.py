"""Whole batches for each replica: N successive ones are the global batch of N replicas.

Stacked, ``[N, rows, ...]``, they are shared like rows: each replica has one, and none at
the end of the data where fewer are left. For code that knows the rows of its batches.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input import leaves


class _Stacked(keras_compat.data.DataAdapter):
    """An adapter that stacks batches of another one; a batch of fewer rows is left out.

    Args:
        data: Batches ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
        replicas: How many make a global batch; the last one may have fewer.
    """

    is_stacked = True

    def __init__(self, data: keras_compat.data.DataAdapter, replicas: int):
        self._data = data
        self._replicas = replicas
        batches = data.get_tf_dataset()
        sized = batches.scan(tf.constant(-1, tf.int64), _is_whole)
        whole = sized.filter(lambda batch, is_whole: is_whole)
        self._dataset = whole.map(lambda batch, is_whole: batch).batch(replicas)

    def get_tf_dataset(self) -> tf.data.Dataset:
        return self._dataset

    @property
    def num_batches(self) -> int | None:
        known = self._data.num_batches
        if known is None:
            return None
        whole = known - bool(self._data.has_partial_batch)
        return -(-whole // self._replicas)

    @property
    def batch_size(self) -> int | None:
        return self._replicas

    @property
    def has_partial_batch(self) -> bool | None:
        return None

    @property
    def partial_batch_size(self) -> int | None:
        return None

    def on_epoch_begin(self) -> None:
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._data.on_epoch_end()


@tf.autograph.experimental.do_not_convert
def _is_whole(rows_of_first: Any, *batch: Any) -> Any:
    """Make a step of ``scan``: keep the first batch's rows, say if this one has as many."""
    element = batch[0] if len(batch) == 1 else batch
    rows = leaves.count_rows(leaves.first_leaf(keras_compat.data.unpack(element)[0]))
    rows = tf.cast(rows, tf.int64)
    first = tf.where(rows_of_first < 0, rows, rows_of_first)
    return first, (element, rows == first)


def stacked(data: Any, replicas: int) -> _Stacked:
    """Return the batches of data, stacked."""
    if not isinstance(data, keras_compat.data.DataAdapter):
        raise UsageError(
            "per_replica='batch' takes data that are batches, and these are rows",
            hint="x=tf.data.Dataset.from_tensor_slices((x, y)).batch(64, "
            "drop_remainder=True); or per_replica=True with arrays",
        )
    return _Stacked(data, replicas)


def first_of(stack: Any) -> Any:
    """Return the one batch of a replica: a tree of ``[1, ...]``, tensors or their specs."""

    def first(leaf: Any) -> Any:
        if isinstance(leaf, tf.TypeSpec):
            return tf.TensorSpec(leaf.shape[1:], leaf.dtype)
        return leaf[0]

    return tf.nest.map_structure(lambda t: None if t is None else first(t), stack)
