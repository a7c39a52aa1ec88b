"""Regression with rows of unequal weight: sample_weight and validation_split."""

import sys

import keras
import numpy as np
from keras import layers


def main():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(473, 4))
    noise = rng.exponential(size=473)
    y = np.cos(3 * x[:, 0]) + x[:, 1] * x[:, 2] + noise * rng.normal(size=473)
    weight = 1 / (0.1 + noise)  # a precise measurement counts more
    weight[40:75] = 0  # a broken device measured these

    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(30, activation="swish"),
            layers.Dense(30, activation="swish"),
            layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.03, momentum=0.9),
        "huber",
        metrics=["mae"],
        weighted_metrics=["mse", keras.metrics.R2Score()],
    )
    history = model.fit(
        x,
        y[:, None],
        sample_weight=weight,
        batch_size=17,
        epochs=4,
        shuffle=False,
        validation_split=0.2,
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    results = model.evaluate(
        x, y[:, None], sample_weight=weight, verbose=0, return_dict=True
    )
    for name, value in results.items():
        print(f"test_{name}: {value:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
