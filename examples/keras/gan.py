"""A GAN: a train_step of its own with two optimizers; the noise comes with the data."""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

ROWS, FEATURES, NOISE = 331, 6, 4


class GAN(keras.Model):
    """A generator and a discriminator, each with an optimizer."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator
        self.g_loss = keras.metrics.Mean(name="g_loss")
        self.d_loss = keras.metrics.Mean(name="d_loss")

    def compile(self, g_optimizer, d_optimizer, loss_fn):
        super().compile()
        self.g_optimizer = g_optimizer
        self.d_optimizer = d_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.g_loss, self.d_loss]

    def train_step(self, data):
        (real, noise), _, _ = keras.utils.unpack_x_y_sample_weight(data)
        ones = ops.ones((ops.shape(real)[0], 1))

        with tf.GradientTape() as tape:
            fake = self.generator(noise, training=True)
            d_loss = self.loss_fn(ones, self.discriminator(real, training=True))
            d_loss += self.loss_fn(0 * ones, self.discriminator(fake, training=True))
        variables = self.discriminator.trainable_variables
        gradients = tape.gradient(d_loss, variables)
        self.d_optimizer.apply_gradients(zip(gradients, variables, strict=True))

        with tf.GradientTape() as tape:
            fake = self.generator(noise, training=True)
            g_loss = self.loss_fn(ones, self.discriminator(fake, training=True))
        variables = self.generator.trainable_variables
        gradients = tape.gradient(g_loss, variables)
        self.g_optimizer.apply_gradients(zip(gradients, variables, strict=True))

        self.g_loss.update_state(g_loss)
        self.d_loss.update_state(d_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def network(inputs, outputs):
    """Return two dense layers between the given widths."""
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(24),
            layers.LeakyReLU(0.2),
            layers.Dense(24, activation="tanh"),
            layers.Dense(outputs),
        ]
    )


def main():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    real = rng.normal(size=(ROWS, 2)) @ rng.normal(size=(2, FEATURES)) + 1
    noise = rng.normal(size=(ROWS, NOISE))

    gan = GAN(generator=network(NOISE, FEATURES), discriminator=network(FEATURES, 1))
    gan.compile(
        g_optimizer=keras.optimizers.Adam(1e-3, beta_1=0.5),
        d_optimizer=keras.optimizers.SGD(0.02),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    history = gan.fit((real, noise), batch_size=32, epochs=4, shuffle=False, verbose=2)
    for name, values in history.history.items():
        print(f"{name}: {' '.join(f'{value:.9g}' for value in values)}")
    if len(sys.argv) > 1:
        gan.generator.save(sys.argv[1])
    return gan


if __name__ == "__main__":
    main()
