"""One tf.function adds gradients up in variables; a second one applies the sums."""

import sys

import keras
import numpy as np
import tensorflow as tf

BATCHES = 3  # batches of one update


def main():
    """Train, and return the model."""
    keras.utils.set_random_seed(21)
    random = np.random.default_rng(22)
    x = random.normal(size=(90, 5)).astype(keras.config.floatx())
    y = np.sin(x[:, :2])
    hidden = keras.layers.Dense(8, "tanh")
    model = keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.02)
    weights = model.trainable_variables
    optimizer.build(weights)
    sums = [tf.Variable(tf.zeros(w.shape, w.dtype), trainable=False) for w in weights]

    @tf.function
    def add(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        for total, gradient in zip(sums, tape.gradient(loss, weights), strict=True):
            total.assign_add(gradient / BATCHES)
        return loss

    @tf.function
    def update():
        gradients, norm = tf.clip_by_global_norm([s.value() for s in sums], 0.5)
        optimizer.apply(gradients, weights)
        for total in sums:
            total.assign(tf.zeros_like(total))
        return norm

    losses = []
    for _ in range(2):
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
        for step, batch in enumerate(data):
            losses.append(float(add(*batch)))
            if step % BATCHES == BATCHES - 1:
                losses.append(float(update()))
    print("losses:", *losses)
    model.optimizer = optimizer
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
