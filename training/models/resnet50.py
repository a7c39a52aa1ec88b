"""ResNet-50, the yardstick of distributed training."""

from __future__ import annotations

import keras

from collective.errors import UsageError
from collective.training.models.mlp import logits_dtype

_SMALLEST = 32


def resnet50(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """ResNet-50 of ``keras.applications``, with random weights.

    Args:
        input_shape: ``(height, width, channels)``, 32x32 or larger, floats.
        classes: Number of classes.

    Returns:
        Uncompiled; logits ``[n, classes]``.

    Raises:
        UsageError: If rows are not images, or too small.
    """
    if len(input_shape) != 3 or min(input_shape[:2]) < _SMALLEST:
        raise UsageError(
            f"the model resnet50 takes images of {_SMALLEST}x{_SMALLEST} or larger, "
            f"and a row of the data has shape {input_shape}",
            hint="--model cnn takes small images; --data synthetic:224x224x3:1000 "
            "makes large ones",
        )
    network = keras.applications.ResNet50(
        weights=None,
        input_shape=input_shape,
        classes=classes,
        classifier_activation=None,
    )
    logits = keras.layers.Activation("linear", dtype=logits_dtype(), name="logits")
    return keras.Model(network.input, logits(network.output), name="resnet50")
