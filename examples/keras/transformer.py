"""A transformer encoder: attention, AdamW without decay of biases, warm-up."""

import sys

import keras
import numpy as np
from keras import layers, ops

ROWS, LENGTH, WORDS, WIDTH = 451, 12, 20, 16


@keras.saving.register_keras_serializable("examples")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Rises in a line, then falls with the square root of the step."""

    def __init__(self, peak, steps):
        super().__init__()
        self.peak, self.steps = peak, steps

    def __call__(self, step):
        step = ops.cast(step, "float32") + 1
        return self.peak * ops.minimum(step / self.steps, ops.sqrt(self.steps / step))

    def get_config(self):
        return {"peak": self.peak, "steps": self.steps}


@keras.saving.register_keras_serializable("examples")
class Positions(layers.Layer):
    """Adds a vector that it learns for each position."""

    def build(self, input_shape):
        self.table = self.add_weight(input_shape[1:], "uniform", name="table")

    def call(self, inputs):
        return inputs + self.table


def encoder(x, heads):
    """Return one block: attention and a dense part, each added to its input."""
    attended = layers.MultiHeadAttention(heads, WIDTH // heads)(x, x)
    x = layers.LayerNormalization()(x + attended)
    dense = layers.Dense(2 * WIDTH, activation="gelu")(x)
    return layers.LayerNormalization()(x + layers.Dense(WIDTH)(dense))


def main():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (ROWS, LENGTH))
    y = (x[:, :-1] == x[:, 1:]).any(axis=1).astype("int32")

    words = keras.Input((LENGTH,), dtype="int32")
    encoded = Positions()(layers.Embedding(WORDS, WIDTH)(words))
    for _ in range(2):
        encoded = encoder(encoded, heads=2)
    pooled = layers.GlobalAveragePooling1D()(encoded)
    model = keras.Model(words, layers.Dense(2)(pooled))

    optimizer = keras.optimizers.AdamW(WarmUp(3e-3, 20), weight_decay=0.01, clipnorm=1)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=2)
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
