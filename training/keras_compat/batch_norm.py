"""The statistics of Keras' batch normalization."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

Moments = Callable[[tf.Tensor, list[int], Any], tuple[tf.Tensor, tf.Tensor] | None]


def batch_norm_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The model's layers of batch normalization, nested ones too."""
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    ]


@contextlib.contextmanager
def replace_moments(moments: Moments, every_layer: bool) -> Iterator[None]:
    """Inside, replaces how layers of batch normalization compute their statistics.

    Args:
        moments: Takes ``(inputs, axes, mask)`` and returns mean and variance, without
            the dimensions ``axes``; or None to leave it to Keras.
        every_layer: False: only layers with ``synchronized=True``.
    """
    layer_type = keras.layers.BatchNormalization
    keras_moments = layer_type._moments

    def replaced(self: Any, inputs: tf.Tensor, mask: Any) -> Any:
        found = None
        if every_layer or self.synchronized:
            found = moments(inputs, list(self._reduction_axes), mask)
        return keras_moments(self, inputs, mask) if found is None else found

    with mock.patch.object(layer_type, "_moments", replaced):
        yield


def masked_moments(
    count: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """What Keras makes of statistics of masked inputs: it divides by count + epsilon.

    Args:
        count: Scalar, inputs that are not masked.
        mean, variance: Of these.
    """
    share = count / (count + tf.cast(keras.config.epsilon(), count.dtype))
    keras_mean = mean * share
    return keras_mean, (variance + tf.square(mean - keras_mean)) * share
