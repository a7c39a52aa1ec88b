"""The time, as an operation of a graph."""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

from collective.training.keras_compat.tensorflow_names import determinism


def now() -> tf.Tensor:
    """Return the seconds since 1970, a float64 scalar that is evaluated at each run.

    This is ``tf.timestamp``, except in a graph of deterministic operations, which refuses it.
    """
    if not determinism.is_enabled():
        return tf.timestamp()
    seconds = tf.numpy_function(lambda: np.float64(time.time()), [], tf.float64)
    return tf.ensure_shape(seconds, [])
