"""The masks that Keras keeps on tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.src import backend


def mask_of(tensor: Any) -> Any:
    """The tensor's mask; None if it has none."""
    return backend.get_keras_mask(tensor)


def set_mask(tensor: tf.Tensor, mask: tf.Tensor) -> None:
    """Gives a tensor the mask that losses and metrics leave rows out by."""
    backend.set_keras_mask(tensor, mask)
