"""Random layers: images are flipped and shifted differently in each epoch, with dropout."""

import sys

import keras
import numpy as np
from keras import layers


def make_data(rows, seed):
    """Return noisy images whose upper part is a little brighter or darker."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, rows)
    images = rng.normal(scale=1.0, size=(rows, 10, 10, 1))
    images[:, :4, 3:7] += np.where(labels, 0.3, -0.3)[:, None, None, None]
    return images.astype("float32"), labels


def main():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((10, 10, 1)),
            layers.RandomFlip("horizontal", seed=3),
            layers.RandomTranslation(0.1, 0.1, seed=4),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.3, seed=5),
            layers.Dense(2),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    x, y = make_data(391, seed=0)
    history = model.fit(
        x,
        y,
        batch_size=32,
        epochs=4,
        shuffle=False,
        validation_data=make_data(103, seed=1),
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
