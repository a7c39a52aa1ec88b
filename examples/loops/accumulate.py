"""Gradients of two batches are added up by hand; a sum over rows, divided by a number."""

import sys

import keras
import numpy as np
import tensorflow as tf

ROWS = 16


def main():
    """Train, and return the model."""
    keras.utils.set_random_seed(10)
    random = np.random.default_rng(13)
    x = random.normal(size=(96, 5)).astype(keras.config.floatx())
    y = x @ random.normal(size=(5, 2)).astype(x.dtype)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
    sums = [tf.zeros_like(v) for v in model.trainable_variables]
    losses = []
    for _ in range(2):
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)
        for step, (inputs, targets) in enumerate(batches):
            with tf.GradientTape() as tape:
                squares = tf.square(model(inputs, training=True) - targets)
                # The program itself uses the size of the batch.
                loss = tf.reduce_sum(squares) / ROWS
            gradients = tape.gradient(loss, model.trainable_variables)
            sums = [a + g for a, g in zip(sums, gradients, strict=True)]
            losses.append(loss.numpy())
            if step % 2:
                optimizer.apply([s / 2 for s in sums], model.trainable_variables)
                sums = [tf.zeros_like(s) for s in sums]
    print("losses:", *losses)
    model.optimizer = optimizer
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
