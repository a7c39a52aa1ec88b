"""Tensors of dtypes that the core does not know, and factors for any dtype."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from collective.operations.kinds import DTYPES

# Reduced in a dtype that holds their sums, and cast back.
_WIDER = {tf.int16: tf.int32, tf.uint16: tf.int32, tf.uint32: tf.int64}


def reducible(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor in a dtype that the core can reduce, if there is one."""
    return tf.cast(tensor, _WIDER.get(tensor.dtype, tensor.dtype))


def moved(tensor: tf.Tensor, move: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Moves a tensor between ranks, as bytes where the core does not know its dtype.

    Args:
        tensor: ``[rows, ...]``, or of any shape where ``move`` takes any.
        move: A collective that does not look at the values.
    """
    if tensor.dtype.name in DTYPES:
        return move(tensor)
    return tf.bitcast(move(tf.bitcast(tensor, tf.uint8)), tensor.dtype)


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
