"""Two hidden layers: the first model of every tutorial."""

from __future__ import annotations

import keras
from keras import layers


def mlp(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """A multi-layer perceptron on the flattened row.

    Args:
        input_shape: Any shape of floats.
        classes: Number of classes.

    Returns:
        Uncompiled; logits ``[n, classes]``.
    """
    return keras.Sequential(
        [
            keras.Input(input_shape),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(64, activation="relu"),
            layers.Dense(classes, dtype=logits_dtype(), name="logits"),
        ],
        name="mlp",
    )


def logits_dtype() -> str:
    """The variables' dtype: a softmax in 16 bits would cost the loss its accuracy."""
    return keras.config.dtype_policy().variable_dtype
