"""Tensors of dtypes that the core does not know, and factors for any dtype."""

from __future__ import annotations

import tensorflow as tf

from collective.operations.kinds import DTYPES

# Reduced in a dtype that holds their sums, and cast back.
_WIDER = {tf.int16: tf.int32, tf.uint16: tf.int32, tf.uint32: tf.int64}


def reducible(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor in a dtype that the core can reduce, if there is one."""
    return tf.cast(tensor, _WIDER.get(tensor.dtype, tensor.dtype))


def movable(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, as bytes (``[..., bytes]``) where the core does not know its dtype."""
    known = tensor.dtype.base_dtype.name in DTYPES
    return tensor if known else tf.bitcast(tensor, tf.uint8)


def restored(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The inverse of ``movable``, after a collective that does not look at values."""
    return tensor if tensor.dtype == dtype else tf.bitcast(tensor, dtype)


def scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """The tensor times a factor; whole numbers are rounded towards zero.

    Half precision is multiplied in float32.
    """
    if isinstance(factor, int | float) and factor == 1:
        return tensor
    dtype = tensor.dtype
    if not dtype.is_floating and not dtype.is_complex:
        wide = tf.float64
    else:
        wide = tf.float32 if dtype.size == 2 else dtype
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), dtype)
