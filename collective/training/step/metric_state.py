"""Values of metrics that continue from step to step, where they are not sums over rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.training import keras_compat


class MetricState:
    """The values of the metrics' variables, as one float64 vector."""

    def __init__(self, model: keras.Model):
        self._metrics = keras_compat.metrics(model)
        self._variables = [v for metric in self._metrics for v in metric.variables]
        self._sizes = [int(np.prod(v.shape)) for v in self._variables]
        self.size = sum(self._sizes)
        self._first = [(v, tf.convert_to_tensor(v)) for v in self._variables]

    def reset(self) -> tf.Tensor:
        """The vector after Keras' ``reset_state`` of each metric.

        A metric that does not reset a variable keeps the value it had at first.
        """
        with keras.StatelessScope(state_mapping=self._first) as scope:
            for metric in self._metrics:
                metric.reset_state()
        return self.pack([scope.get_current_value(v) for v in self._variables])

    def end_of(self, report: Any) -> Any:
        """The part of a vector at whose end the values are: a view of an array."""
        return report[report.shape[0] - self.size :]

    def pack(self, values: list[tf.Tensor]) -> tf.Tensor:
        """One vector of the values of all variables."""
        flat = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in values]
        return tf.concat([*flat, tf.zeros([0], tf.float64)], axis=0)

    def unpack(self, vector: tf.Tensor) -> list[tf.Tensor]:
        """The values in a vector, in shape and dtype of the variables."""
        if not self._sizes:
            return []
        pieces = tf.split(vector, self._sizes)
        return [
            tf.reshape(tf.cast(piece, variable.dtype), variable.shape)
            for piece, variable in zip(pieces, self._variables, strict=True)
        ]
