"""Models by name, and the user's own by ``module:function``.

Each built-in model takes the shape of one row of floats and the number of classes, and
raises UsageError if such rows do not fit it. It is not compiled, and ends in logits
``[n, classes]``, without a softmax, in the variables' precision: its loss is
``keras.losses.SparseCategoricalCrossentropy(from_logits=True)``.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
from keras import layers, ops

from collective.errors import UsageError
from collective.training.process.lookup import call, lookup

Shape = tuple[int, ...]


def _logits(classes: int) -> layers.Dense:
    """Return the last layer, in the variables' dtype: a softmax in 16 bits loses accuracy."""
    return layers.Dense(classes, dtype=_variable_dtype(), name="logits")


def _variable_dtype() -> str:
    return keras.config.dtype_policy().variable_dtype


def mlp(input_shape: Shape, classes: int) -> keras.Model:
    """Return a model of two hidden layers on the flattened row, of any shape."""
    return keras.Sequential(
        [
            keras.Input(input_shape),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(64, activation="relu"),
            _logits(classes),
        ],
        name="mlp",
    )


def cnn(input_shape: Shape, classes: int) -> keras.Model:
    """Return a model of convolutions and pooling down to 4x4, then two dense layers.

    Rows are ``(height, width, channels)`` or ``(height, width)``. An 8x8 image is pooled
    once, an image of 28x28 or 32x32 three times.
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
    x = _logits(classes)(x)
    return keras.Model(inputs, x, name="cnn")


def resnet50(input_shape: Shape, classes: int) -> keras.Model:
    """Return ResNet-50 with random weights, for images of 32x32 or more with channels."""
    if len(input_shape) != 3 or min(input_shape[:2]) < 32:
        raise UsageError(
            f"the model resnet50 takes images of 32x32 or larger, "
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
    logits = layers.Activation("linear", dtype=_variable_dtype(), name="logits")
    return keras.Model(network.input, logits(network.output), name="resnet50")


class Positions(layers.Layer):
    """Adds a learned vector to each position of a sequence."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Make one vector for each position; the input is ``[n, length, width]``."""
        self.vectors = self.add_weight(
            shape=input_shape[1:], initializer="random_normal", name="vectors"
        )

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Return ``inputs`` plus the vectors."""
        return ops.add(inputs, self.vectors)


def transformer(
    input_shape: Shape,
    classes: int,
    *,
    blocks: int = 2,
    width: int = 64,
    heads: int = 4,
    dropout: float = 0.1,
    vocabulary: int = 20_000,
) -> keras.Model:
    """Return a model of pre-norm encoder blocks, averaged over positions.

    Args:
        input_shape: ``(length,)`` of integer tokens below ``vocabulary``;
            ``(length, features)`` of floats; or ``(height, width, channels)``: each
            row of an image is a token.
        width: Size of a token's vector.
        heads: Attention heads.
        dropout: Rate, in attention and after each sub-layer.
        vocabulary: Number of different tokens.
    """
    if len(input_shape) == 1:
        inputs = keras.Input(input_shape, dtype="int32")
        x = layers.Embedding(vocabulary, width)(inputs)
    else:
        inputs = keras.Input(input_shape)
        x = layers.Reshape((input_shape[0], -1))(inputs)
        x = layers.Dense(width)(x)
    x = Positions()(x)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(heads, width // heads, dropout=dropout)(y, y)
        x = layers.add([x, layers.Dropout(dropout)(y)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        y = layers.Dense(width)(y)
        x = layers.add([x, layers.Dropout(dropout)(y)])
    x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x)
    x = _logits(classes)(x)
    return keras.Model(inputs, x, name="transformer")


MODELS: dict[str, Callable[[Shape, int], keras.Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet50": resnet50,
    "transformer": transformer,
}


def build(what: str, *, input_shape: Shape, classes: int | None) -> keras.Model:
    """Build a model.

    Args:
        what: A name in ``MODELS``, or ``module:function``: called with those of
            ``input_shape`` and ``classes`` that it takes; returns a keras.Model,
            compiled or not.
        input_shape: Shape of one row of x, without the batch dimension.
        classes: Number of classes, or None if the data have none, which only the user's
            own models accept.
    """
    if ":" in what:
        model = call(lookup(what), input_shape=input_shape, classes=classes)
        if not isinstance(model, keras.Model):
            raise UsageError(
                f"{what} returned a {type(model).__name__}, not a keras.Model",
                hint=f"end {what.partition(':')[2]} with: return model",
            )
        return model
    if what not in MODELS:
        raise UsageError(
            f"there is no model {what!r}",
            hint=f"--model {' | '.join(MODELS)} | module:function",
        )
    if classes is None:
        raise UsageError(
            f"the model {what} sorts into classes, and the data has none",
            hint="use integer labels from 0 up, or your own --model module:function",
        )
    return MODELS[what](tuple(input_shape), classes)
