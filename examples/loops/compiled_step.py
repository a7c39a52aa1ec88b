"""A loop around a tf.function, with Dropout, a penalty, metrics and test steps."""

import sys

import keras
import numpy as np
import tensorflow as tf


def main():
    """Train, and return the model."""
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(5)
    x = random.normal(size=(100, 8, 8, 1)).astype(keras.config.floatx())
    y = (x.reshape(100, -1)[:, :4].argmax(1)).astype("int64")
    train = tf.data.Dataset.from_tensor_slices((x, y)).batch(24)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(4),
        ]
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9, clipnorm=1.0)
    mean = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def train_step(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = loss_of(labels, logits) + tf.add_n(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        mean.update_state(loss)
        accuracy.update_state(labels, logits)
        right = tf.reduce_sum(tf.cast(tf.argmax(logits, 1) == labels, tf.int32))
        return loss, logits, right

    @tf.function
    def test_step(images, labels):
        return loss_of(labels, model(images, training=False))

    for epoch in range(2):
        counted, outputs, losses = 0, [], []
        for images, labels in train:
            loss, logits, right = train_step(images, labels)
            counted += int(right)
            outputs.append(logits.numpy())
            losses.append(float(loss))
        print(f"losses{epoch}:", *losses)
        print(f"right{epoch}:", counted)
        print(f"outputs{epoch}:", *np.concatenate(outputs).sum(axis=0))
        print(f"metrics{epoch}:", float(mean.result()), float(accuracy.result()))
        mean.reset_state()
        accuracy.reset_state()
    print("test:", *[float(test_step(images, labels)) for images, labels in train])
    model.optimizer = optimizer
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
