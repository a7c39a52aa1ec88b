"""Data from a keras.utils.PyDataset, which makes its batches when asked."""

import math
import sys

import keras
import numpy as np
from keras import layers


class Spirals(keras.utils.PyDataset):
    """Points of three spirals, with a weight each."""

    def __init__(self, rows, batch_size, seed, **kwargs):
        super().__init__(**kwargs)
        self.rows, self.batch_size, self.seed = rows, batch_size, seed

    def __len__(self):
        return math.ceil(self.rows / self.batch_size)

    def __getitem__(self, index):
        start = index * self.batch_size
        rows = min(self.batch_size, self.rows - start)
        rng = np.random.default_rng([self.seed, index])
        radius = rng.uniform(0.1, 1, rows)
        arm = rng.integers(0, 3, rows)
        angle = 4 * radius + arm * 2 * np.pi / 3 + 0.1 * rng.normal(size=rows)
        points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        return points, arm, 0.5 + radius


def main():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(32, activation="tanh"),
            layers.Dense(32, activation="tanh"),
            layers.Dense(3),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    history = model.fit(
        Spirals(455, batch_size=36, seed=0, workers=2),
        epochs=4,
        shuffle=False,
        validation_data=Spirals(118, batch_size=50, seed=1),
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    logits = model.predict(Spirals(118, batch_size=50, seed=1), verbose=0)
    print(f"rows: {len(logits)}")
    print(f"mean_logits: {' '.join(f'{value:.9g}' for value in logits.mean(axis=0))}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
