"""State that layers assign in the forward pass: one new value from all replicas' values.

Replicas, and the micro-batches of one, start from the same old value and make new ones. The
value after the step is their mean, weighted by rows. It is exact if all assign the same
value (a counter of steps, SpectralNormalization), and for a mean over rows. It is not exact
for a state that is a sum or a maximum over rows (docs/reference/sharp-bits.md).
"""

from __future__ import annotations

import tensorflow as tf


def contribution(old: tf.Tensor, new: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Return the contribution of one piece of a batch to the weighted mean.

    Args:
        old: The value before the step; of any dtype.
        new: The value after it, as this piece has assigned it.
        share: Scalar, the piece's share of the rows of the global batch.

    Returns:
        The change times the share; in float64 if float32 cannot hold the state's numbers,
        else in float32. An integer's change is exact up to 2^53.
    """
    travels = tf.float32 if _fits(old.dtype) else tf.float64
    if old.dtype.is_floating:
        change = tf.cast(new, travels) - _origin(tf.cast(old, travels))
    else:
        change = tf.cast(tf.cast(new, tf.int64) - tf.cast(old, tf.int64), travels)
    return change * tf.cast(share, travels)


def updated(old: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Return the value after the step.

    Args:
        old: The value before it.
        total: The sum of all contributions, in any float dtype.
    """
    if old.dtype.is_floating:
        wide = old if old.dtype.size >= total.dtype.size else tf.cast(old, total.dtype)
        return tf.cast(_origin(wide) + tf.cast(total, wide.dtype), old.dtype)
    change = tf.cast(tf.round(total), tf.int64)
    return tf.cast(tf.cast(old, tf.int64) + change, old.dtype)


def _fits(dtype: tf.DType) -> bool:
    return dtype.is_floating and dtype != tf.float64


def _origin(old: tf.Tensor) -> tf.Tensor:
    """Return the value from which changes are counted: the old one, or 0 if not finite.

    A state may start at -inf, and the change from there to a number is not a number.
    """
    return tf.where(tf.math.is_finite(old), old, tf.zeros_like(old))
