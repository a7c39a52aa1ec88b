"""A variational autoencoder: the KL term by add_loss, the noise an input."""

import sys

import keras
import numpy as np
from keras import layers, ops

ROWS, PIXELS, CODE = 353, 30, 3


@keras.saving.register_keras_serializable("examples")
class Sampling(layers.Layer):
    """Turns mean, logarithm of the variance and noise into a sample."""

    def __init__(self, weight, **kwargs):
        super().__init__(**kwargs)
        self.weight = weight

    def call(self, inputs):
        mean, log_variance, noise = inputs
        divergence = ops.exp(log_variance) + ops.square(mean) - 1 - log_variance
        self.add_loss(self.weight * ops.mean(0.5 * ops.sum(divergence, axis=-1)))
        return mean + ops.exp(0.5 * log_variance) * noise

    def get_config(self):
        return {**super().get_config(), "weight": self.weight}


def make_data():
    """Return waves of random phase and frequency, and the noise for each."""
    rng = np.random.default_rng(0)
    phase, frequency = rng.uniform(0, 2, size=(2, ROWS, 1))
    waves = np.sin((1 + frequency) * np.linspace(0, 4, PIXELS) + 3 * phase)
    return waves.astype("float32"), rng.normal(size=(ROWS, CODE)).astype("float32")


def main():
    keras.utils.set_random_seed(1)
    waves, noise = make_data()

    wave = keras.Input((PIXELS,), name="wave")
    epsilon = keras.Input((CODE,), name="noise")
    hidden = layers.Dense(32, activation="tanh")(wave)
    mean = layers.Dense(CODE)(hidden)
    log_variance = layers.Dense(CODE)(hidden)
    code = Sampling(weight=0.01)([mean, log_variance, epsilon])
    hidden = layers.Dense(32, activation="tanh")(code)
    model = keras.Model([wave, epsilon], layers.Dense(PIXELS)(hidden))

    model.compile(keras.optimizers.Adam(3e-3), "mse", metrics=["mse"])
    history = model.fit(
        [waves, noise],
        waves,
        batch_size=50,
        epochs=5,
        shuffle=False,
        validation_split=0.2,
        verbose=0,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
