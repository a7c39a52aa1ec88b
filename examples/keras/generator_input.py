"""Data from a Python generator without an end: steps_per_epoch ends an epoch."""

import sys

import keras
import numpy as np
from keras import layers


def batches(seed):
    """Yield batches of noisy oscillations, of unequal size, for ever."""
    rng = np.random.default_rng(seed)
    time = np.linspace(0, 1, 25)
    while True:
        rows = int(rng.integers(11, 24))
        frequency = rng.uniform(1, 6, size=(rows, 1))
        waves = np.sin(2 * np.pi * frequency * time + rng.uniform(0, 6, (rows, 1)))
        waves += 0.1 * rng.normal(size=waves.shape)
        yield waves[..., None].astype("float32"), frequency.astype("float32")


def main():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((25, 1)),
            layers.Conv1D(12, 5, activation="relu"),
            layers.Conv1D(12, 5, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.005, 10, 0.9)
    model.compile(keras.optimizers.Adam(rate), "mae", metrics=["mse"])
    history = model.fit(
        batches(seed=0),
        steps_per_epoch=15,
        epochs=3,
        validation_data=next(batches(seed=1)),
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
