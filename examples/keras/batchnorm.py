"""A convnet with BatchNormalization, whose statistics cover the whole batch."""

import sys

import keras
import numpy as np
from keras import layers


def make_data(rows, seed):
    """Return textures of four kinds, at an unknown brightness."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, rows)
    i, j = np.meshgrid(np.arange(8), np.arange(8))
    textures = np.stack([i % 2, j % 2, (i + j) % 2, (i // 2) % 2])
    brightness = rng.uniform(0.5, 4, size=(rows, 1, 1))
    images = brightness * (textures[labels] + rng.normal(size=(rows, 8, 8)))
    return images[..., None].astype("float32"), labels


def main():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for filters in (8, 12):
        model.add(layers.Conv2D(filters, 3, use_bias=False))
        model.add(layers.BatchNormalization(synchronized=True, momentum=0.8))
        model.add(layers.ReLU())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(4))
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    x, y = make_data(307, seed=0)
    history = model.fit(
        x,
        y,
        batch_size=32,
        epochs=3,
        shuffle=False,
        validation_data=make_data(89, seed=1),
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
