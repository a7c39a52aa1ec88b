"""A loop written out: a tape, an optimizer, metrics. Nothing is a tf.function."""

import sys

import keras
import numpy as np
import tensorflow as tf


def rows():
    """Return features and classes."""
    random = np.random.default_rng(11)
    x = random.normal(size=(150, 12)).astype(keras.config.floatx())
    return x, x[:, :3].argmax(1)


def main():
    """Train, and return the model."""
    keras.utils.set_random_seed(2)
    x, y = rows()
    train = tf.data.Dataset.from_tensor_slices((x[:120], y[:120])).batch(33)
    test = tf.data.Dataset.from_tensor_slices((x[120:], y[120:])).batch(16)
    model = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(16, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.01)
    seen = keras.metrics.SparseCategoricalAccuracy()
    tested = keras.metrics.SparseCategoricalAccuracy()
    losses = []
    for _ in range(2):
        total = 0.0
        for step, (images, labels) in enumerate(train):
            with tf.GradientTape() as tape:
                logits = model(images, training=True)
                loss = loss_of(labels, logits)
            gradients = tape.gradient(loss, model.trainable_weights)
            optimizer.apply(gradients, model.trainable_weights)
            seen.update_state(labels, logits)
            total += float(loss)
            if step == 2:
                losses.append(float(loss))
        losses.append(total)
        print("accuracy:", float(seen.result()))
        seen.reset_state()
        for images, labels in test:
            tested.update_state(labels, model(images, training=False))
        print("test_accuracy:", float(tested.result()))
    print("losses:", *losses)
    model.optimizer = optimizer
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
