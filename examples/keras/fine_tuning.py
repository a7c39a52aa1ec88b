"""Transfer: a new head on frozen layers, then all of it at a lower learning rate."""

import sys

import keras
import numpy as np
from keras import layers


def make_images(rows, kinds, seed):
    """Return images of stripes; the direction gives the class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, kinds, rows)
    angle = (labels * np.pi / kinds)[:, None, None]
    i, j = np.meshgrid(np.arange(10), np.arange(10))
    waves = np.sin(1.5 * (i * np.cos(angle) + j * np.sin(angle)))
    noise = 0.4 * rng.normal(size=waves.shape)
    return (waves + noise)[..., None].astype("float32"), labels


def report(stage, history):
    """Print the results of the last epoch."""
    for name, values in history.history.items():
        print(f"{stage}_{name}: {values[-1]:.9g}")


def main():
    keras.utils.set_random_seed(1)
    base = keras.Sequential(
        [
            keras.Input((10, 10, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Conv2D(12, 3, strides=2, activation="relu"),
            layers.GlobalMaxPooling2D(),
        ]
    )
    options = dict(batch_size=32, epochs=2, shuffle=False, verbose=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    # First, train on a task with many rows.
    first = keras.Sequential([base, layers.Dense(6)])
    first.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    report("base", first.fit(*make_images(353, 6, seed=0), **options))

    # Then train on a task with few: the layers below the new head stay fixed.
    base.trainable = False
    inputs = keras.Input((10, 10, 1))
    outputs = layers.Dense(4)(base(inputs, training=False))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    x, y = make_images(121, 4, seed=1)
    report("head", model.fit(x, y, **options))

    # Finally, train all layers slowly.
    base.trainable = True
    base.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    report("tuned", model.fit(x, y, **options))
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
