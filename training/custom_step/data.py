"""Rows as Keras' ``fit`` gives them to a user's step."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from collective.training.replica.rows import Rows


def packed(rows: Rows) -> Any:
    """The ``data`` of a step, as Keras' ``fit`` gives them.

    Floating-point rows have the precision that Keras converts arrays to.
    """
    dtype = keras.config.floatx()
    x, y, weight = (
        None
        if isinstance(part, tuple) and not part
        else tf.nest.map_structure(
            lambda t: tf.cast(t, dtype) if t.dtype.is_floating else t, part
        )
        for part in rows
    )
    return keras.utils.pack_x_y_sample_weight(x, y, weight)


def with_a_row(rows: Rows, count: tf.Tensor) -> Rows:
    """The rows; one row of zeros where there are none.

    A replica without rows takes part in every sum: with such a row, times zero.
    """
    missing = tf.cast(tf.equal(count, 0), tf.int64)

    def filled(tensor: tf.Tensor) -> tf.Tensor:
        shape = tf.concat([[missing], tf.shape(tensor, tf.int64)[1:]], axis=0)
        whole = tf.concat([tensor, tf.zeros(shape, tensor.dtype)], axis=0)
        whole.set_shape([None, *tensor.shape[1:]])
        return whole

    return tf.nest.map_structure(filled, rows)
