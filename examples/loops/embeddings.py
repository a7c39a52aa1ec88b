"""A class with a loop in a method; tables, masks, and a step in two functions."""

import sys

import keras
import numpy as np
import tensorflow as tf


class Trainer:
    """Trains a classifier of sequences."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.loss = keras.losses.BinaryCrossentropy(from_logits=True)
        self.steps = 0

    def gradients(self, words, labels):
        """Return the loss of a batch, and its gradients."""
        with tf.GradientTape() as tape:
            value = self.loss(labels, self.model(words, training=True))
        return value, tape.gradient(value, self.model.trainable_variables)

    def fit(self, words, labels, epochs, rows):
        """Return the losses."""
        losses = []
        for _ in range(epochs):
            for first in range(0, len(words), rows):
                batch = slice(first, first + rows)
                value, gradients = self.gradients(words[batch], labels[batch])
                gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
                self.optimizer.apply_gradients(
                    zip(gradients, self.model.trainable_variables, strict=True)
                )
                self.steps += 1
                losses += [float(value), float(norm)]
        return losses


def main():
    """Train, and return the model."""
    keras.utils.set_random_seed(6)
    random = np.random.default_rng(9)
    words = random.integers(1, 30, (64, 7))
    words[:, 5:] *= random.integers(0, 2, (64, 1))
    labels = ((words % 3 == 0).sum(1) > 2).astype(keras.config.floatx())[:, None]
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int64"),
            keras.layers.Embedding(30, 5, mask_zero=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    trainer = Trainer(model, keras.optimizers.Adam(0.02))
    print("losses:", *trainer.fit(words, labels, epochs=2, rows=20))
    print("steps:", trainer.steps)
    model.optimizer = trainer.optimizer
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
