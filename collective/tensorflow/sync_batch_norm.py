"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from collective import session, tensorflow_ops


@keras.saving.register_keras_serializable(package="collective")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """``keras.layers.BatchNormalization``, with the statistics of all ranks in training.

    Each rank has the weight of its rows, so batches may differ in size. Masked rows are
    left out.

    Args:
        fused: Only False is possible.
        **kwargs: As for ``keras.layers.BatchNormalization``.

    Raises:
        ValueError: If ``fused`` is not False.
    """

    def __init__(self, fused: bool = False, **kwargs: Any):
        if fused is not False:
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)

    def _moments(self, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        mean, variance = super()._moments(inputs, mask)
        if not session.is_initialized():
            return mean, variance
        if mask is None:
            elements = tf.size(inputs, tf.int64) // tf.size(mean, tf.int64)
        else:
            elements = tf.math.count_nonzero(
                tf.broadcast_to(tf.cast(mask, tf.bool), tf.shape(inputs)[:-1])
            )
        # [1, 3, channels]: no square of a mean is subtracted from a mean of squares.
        shape = tf.shape(mean)
        flat, spread = tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
        count = tf.fill(tf.shape(flat), tf.cast(elements, flat.dtype))
        everyone = tensorflow_ops.allgather(tf.stack([flat, spread, count])[None])
        means, variances, counts = tf.unstack(everyone, axis=1)
        share = counts / tf.reduce_sum(counts, axis=0)
        # A rank without a row has NaN in its statistics.
        means = tf.where(counts > 0, means, 0)
        variances = tf.where(counts > 0, variances, 0)
        mean_of_all = tf.reduce_sum(share * means, axis=0)
        off = tf.square(means - mean_of_all)
        variance_of_all = tf.reduce_sum(share * (variances + off), axis=0)
        return tf.reshape(mean_of_all, shape), tf.reshape(variance_of_all, shape)
