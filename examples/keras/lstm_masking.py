"""Sequences of unequal length: padded batches, masks, one label for each step."""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

ROWS, WORDS = 257, 30


def sequences():
    """Yield words and, for each, whether its neighbours are both smaller."""
    rng = np.random.default_rng(0)
    for length in rng.integers(3, 18, ROWS):
        words = rng.integers(1, WORDS, length)
        around = np.pad(words, 1)
        yield words, (words > around[:-2]) & (words > around[2:])


def make_dataset():
    """Return batches as long as their longest sequence; 0 fills the others."""
    signature = (
        tf.TensorSpec((None,), tf.int32),
        tf.TensorSpec((None,), tf.int32),
    )
    data = tf.data.Dataset.from_generator(sequences, output_signature=signature)
    data = data.apply(tf.data.experimental.assert_cardinality(ROWS))
    return data.padded_batch(16)


def main():
    keras.utils.set_random_seed(1)
    words = keras.Input((None,), dtype="int32")
    x = layers.Embedding(WORDS, 12, mask_zero=True)(words)
    x = layers.Bidirectional(layers.LSTM(12, return_sequences=True))(x)
    x = layers.Dense(12, activation="relu")(x)
    model = keras.Model(words, layers.Dense(2)(x))
    model.compile(
        optimizer=keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=[
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="cross")
        ],
    )
    history = model.fit(make_dataset(), epochs=3, verbose=2)
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
