"""A replica's share of the rows of a global batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class Share(NamedTuple):
    """A replica's part of a global batch."""

    # int64 scalar, its rows; 0 where the batch has fewer rows than replicas.
    rows: tf.Tensor
    global_rows: tf.Tensor  # int64 scalar
    number: tf.Tensor  # int64 scalar, of the step
    replica: tf.Tensor  # int64 scalar
    # int64 scalar, the place of the first of its rows in the batch.
    first_row: tf.Tensor

    def of(self, tensor: Any, dtype: tf.DType | None = None) -> tf.Tensor:
        """The tensor times the share; zero without rows, whatever the tensor is."""
        dtype = dtype or tensor.dtype
        share = tf.cast(self.rows, tf.float64) / tf.cast(self.global_rows, tf.float64)
        return tf.math.multiply_no_nan(tf.cast(tensor, dtype), tf.cast(share, dtype))

    def undone(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor divided by the share; zero without rows."""
        inverse = tf.math.divide_no_nan(
            tf.cast(self.global_rows, tf.float64), tf.cast(self.rows, tf.float64)
        )
        return tensor * tf.cast(inverse, tensor.dtype)

    def if_any(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor; zero without rows."""
        return tf.where(self.rows > 0, tensor, tf.zeros_like(tensor))
