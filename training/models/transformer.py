"""A small transformer encoder, on token sequences or on the rows of images."""

from __future__ import annotations

import keras
from keras import layers, ops

from collective.training.models.mlp import logits_dtype
from collective.training.parallel import (
    ColumnParallelDense,
    RowParallelDense,
    ShardedEmbedding,
)


class Positions(layers.Layer):
    """Adds a learned vector to each position of a sequence."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes one vector a position; input is ``[n, length, width]``."""
        self.vectors = self.add_weight(
            shape=input_shape[1:], initializer="random_normal", name="vectors"
        )

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Returns ``inputs`` plus the vectors."""
        return ops.add(inputs, self.vectors)


def transformer(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    blocks: int = 2,
    width: int = 64,
    heads: int = 4,
    dropout: float = 0.1,
    vocabulary: int = 20_000,
) -> keras.Model:
    """Pre-norm encoder blocks, averaged over positions.

    With ``--tensor-parallel``, embedding and feed-forward layers lie in parts over ranks.

    Args:
        input_shape: ``(length,)`` of integer tokens below ``vocabulary``;
            ``(length, features)`` of floats; or ``(height, width, channels)``: each
            row of an image is a token.
        classes: Number of classes.
        blocks: Encoder blocks.
        width: Size of a token's vector.
        heads: Attention heads.
        dropout: Rate, in attention and behind each sub-layer.
        vocabulary: Number of different tokens, for integer rows.

    Returns:
        Uncompiled; logits ``[n, classes]``.
    """
    if len(input_shape) == 1:
        inputs = keras.Input(input_shape, dtype="int32")
        x = ShardedEmbedding(vocabulary, width)(inputs)
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
        y = ColumnParallelDense(4 * width, activation="gelu", gather_output=False)(y)
        y = RowParallelDense(width, input_is_parallel=True)(y)
        x = layers.add([x, layers.Dropout(dropout)(y)])
    x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dense(classes, dtype=logits_dtype(), name="logits")(x)
    return keras.Model(inputs, x, name="transformer")
