"""A small convolutional network for small images."""

from __future__ import annotations

import keras
from keras import layers

from collective.errors import UsageError
from collective.training.models.mlp import logits_dtype


def cnn(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """Convolutions and pooling down to 4x4, then two dense layers.

    An 8x8 image is pooled once, one of 28x28 or 32x32 three times.

    Args:
        input_shape: ``(height, width, channels)`` or ``(height, width)``, floats.
        classes: Number of classes.

    Returns:
        Uncompiled; logits ``[n, classes]``.

    Raises:
        UsageError: If rows are not images.
    """
    if len(input_shape) not in (2, 3):
        raise UsageError(
            f"the model cnn takes images, and a row of the data has shape "
            f"{input_shape}",
            hint="--model mlp takes any shape",
        )
    inputs = keras.Input(input_shape)
    x = inputs if len(input_shape) == 3 else layers.Reshape((*input_shape, 1))(inputs)
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    side, filters = min(input_shape[:2]), 64
    while side >= 8:
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
        # Wider as it gets smaller; the cap keeps large images affordable.
        side, filters = side // 2, min(2 * filters, 128)
    x = layers.Flatten()(x)
    x = layers.Dense(128, activation="relu")(x)
    x = layers.Dense(classes, dtype=logits_dtype(), name="logits")(x)
    return keras.Model(inputs, x, name="cnn")
