"""Rows of a batch in the form in which a ``tf.function`` takes them.

Functions with a signature do not accept None, so ``()`` stands for a missing part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training.input.pipeline import Batch


class BatchRows(NamedTuple):
    """Rows of a batch: trees of tensors ``[n, ...]``, ``()`` for a missing part."""

    x: Any
    y: Any
    sample_weight: Any


def rows_of(batch: Batch) -> BatchRows:
    """Return the rows of a batch, or of a specification of one."""
    x, y, sample_weight, *_ = without_none(batch)
    return BatchRows(x, y, sample_weight)


def without_none(batch: Batch) -> Batch:
    """Return the batch with ``()`` in place of None."""
    return Batch(*(() if part is None else part for part in batch))


def or_none(part: Any) -> Any:
    """Put None in place of ``()``, as Keras expects it."""
    return None if isinstance(part, tuple) and not part else part


def packed(rows: BatchRows) -> Any:
    """Return the ``data`` of a step, as Keras' ``fit`` passes them.

    Floating-point rows have the precision that Keras converts arrays to.
    """
    dtype = keras.config.floatx()
    cast = tf.nest.map_structure(
        lambda t: tf.cast(t, dtype) if t.dtype.is_floating else t, rows
    )
    return keras.utils.pack_x_y_sample_weight(*map(or_none, cast))


def zeros(spec: Batch) -> BatchRows:
    """Return a row of zeros of a specification; open sizes become 1."""
    return BatchRows(*tf.nest.map_structure(_zeros, tuple(rows_of(spec))))


def _zeros(spec: Any) -> Any:
    shape = [1 if size is None else size for size in spec.shape]
    text = spec.dtype == tf.string
    dense = tf.zeros(shape, tf.int32 if text else spec.dtype)
    if text:
        dense = tf.strings.as_string(dense)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensor.from_tensor(dense, ragged_rank=spec.ragged_rank)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.sparse.from_dense(dense)
    return dense


def at_least_one_row(rows: Any, count: tf.Tensor) -> Any:
    """Return a tree of tensors ``[n, ...]``, or with one made-up row if n is 0.

    A replica without rows takes part in the collectives of the others, and many layers
    cannot run without a row. The row has zeros, which every table contains. It has ones if
    there is a GPU, because cuDNN refuses a sequence that is masked from its beginning.

    Raises:
        UsageError: Rows are ragged or sparse.
    """
    missing = tf.cast(count == 0, tf.int32)
    on_gpu = bool(tf.config.list_logical_devices("GPU"))

    def padded(tensor: tf.Tensor) -> tf.Tensor:
        if not isinstance(tensor, tf.Tensor):
            raise UsageError(
                f"a replica may have no rows of a short batch, and rows of a "
                f"{type(tensor).__name__} cannot be made up for it",
                hint="a batch size that leaves each replica a row of every batch",
            )
        shape = tf.concat([[missing], tf.shape(tensor)[1:]], axis=0)
        make = tf.ones if on_gpu and tensor.dtype != tf.string else tf.zeros
        more = tf.concat([tensor, make(shape, tensor.dtype)], axis=0)
        more.set_shape([None, *tensor.shape[1:]])
        return more

    return tf.nest.map_structure(padded, rows)
