"""A convnet on images from a batched tf.data.Dataset."""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers

SIZE, CLASSES = 12, 3


def make_images(rows, seed):
    """Return noisy images of a horizontal bar, a vertical one, or a square."""
    rng = np.random.default_rng(seed)
    images = rng.uniform(0, 0.3, size=(rows, SIZE, SIZE, 1))
    labels = rng.integers(0, CLASSES, rows)
    for image, label, at in zip(
        images, labels, rng.integers(1, SIZE - 5, (rows, 2)), strict=True
    ):
        height, width = [(2, 5), (5, 2), (4, 4)][label]
        image[at[0] : at[0] + height, at[1] : at[1] + width] += 0.6
    return (images * 255).clip(0, 255).astype("uint8"), labels


def main():
    keras.utils.set_random_seed(1)

    def dataset(rows, seed):
        data = tf.data.Dataset.from_tensor_slices(make_images(rows, seed))
        data = data.batch(25).map(lambda x, y: (tf.cast(x, "float32"), y))
        return data.prefetch(tf.data.AUTOTUNE)

    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(CLASSES),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    history = model.fit(
        dataset(415, seed=0), epochs=3, validation_data=dataset(101, seed=1), verbose=2
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
