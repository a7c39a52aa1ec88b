"""Two networks and two tapes in one tf.function; noise of the batch's size."""

import sys

import keras
import numpy as np
import tensorflow as tf


def main():
    """Train, and return the generator."""
    keras.utils.set_random_seed(8)
    random = np.random.default_rng(3)
    dtype = keras.config.floatx()
    real = random.normal(2.0, 0.5, (72, 4)).astype(dtype)
    seeds = keras.random.SeedGenerator(5)
    layers = keras.layers
    generator = keras.Sequential(
        [keras.Input((3,)), layers.Dense(8, "relu"), layers.Dense(4)]
    )
    judge = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, "relu"), layers.Dense(1)]
    )
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    g_optimizer = keras.optimizers.Adam(0.01)
    d_optimizer = keras.optimizers.Adam(0.01)

    @tf.function
    def train_step(examples):
        drawn = keras.random.normal((tf.shape(examples)[0], 3), seed=seeds)
        with tf.GradientTape() as g_tape, tf.GradientTape() as d_tape:
            made = generator(drawn, training=True)
            good, bad = judge(examples, training=True), judge(made, training=True)
            g_loss = cross_entropy(tf.ones_like(bad), bad)
            d_loss = cross_entropy(tf.ones_like(good), good)
            d_loss += cross_entropy(tf.zeros_like(bad), bad)
        of_g = g_tape.gradient(g_loss, generator.trainable_variables)
        of_d = d_tape.gradient(d_loss, judge.trainable_variables)
        g_optimizer.apply(of_g, generator.trainable_variables)
        d_optimizer.apply(of_d, judge.trainable_variables)
        return {"g": g_loss, "d": d_loss}

    data = tf.data.Dataset.from_tensor_slices(real).batch(25)
    for _ in range(2):
        for examples in data:
            losses = train_step(examples)
            print("losses:", *[float(value) for value in losses.values()])
    generator.optimizer, generator.d_optimizer = g_optimizer, d_optimizer
    if len(sys.argv) > 1:
        generator.save(sys.argv[1])
    return generator


if __name__ == "__main__":
    main()
