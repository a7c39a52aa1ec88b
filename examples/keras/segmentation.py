"""Segmentation by a small U-Net: Dice over the batch and cross entropy in one loss."""

import sys

import keras
import numpy as np
from keras import layers

SIZE = 16


def make_data(rows, seed):
    """Return images with a bright disc, and the mask of the disc."""
    rng = np.random.default_rng(seed)
    centre = rng.uniform(4, SIZE - 4, size=(rows, 1, 1, 2))
    radius = rng.uniform(2, 5, size=(rows, 1, 1, 1))
    grid = np.stack(np.meshgrid(np.arange(SIZE), np.arange(SIZE)), axis=-1)
    distance = np.sqrt(((grid - centre) ** 2).sum(axis=-1, keepdims=True))
    mask = (distance < radius).astype("float32")
    return (mask + rng.normal(scale=0.5, size=mask.shape)).astype("float32"), mask


def double(x, filters):
    """Return the result of two convolutions."""
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    return x


def make_model():
    inputs = keras.Input((SIZE, SIZE, 1))
    top = double(inputs, 6)
    middle = double(layers.MaxPooling2D()(top), 12)
    bottom = double(layers.MaxPooling2D()(middle), 16)
    x = layers.concatenate([layers.UpSampling2D()(bottom), middle])
    x = layers.concatenate([layers.UpSampling2D()(double(x, 12)), top])
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(double(x, 6)))


dice = keras.losses.Dice()
cross_entropy = keras.losses.BinaryCrossentropy()


def dice_and_cross_entropy(y_true, y_pred):
    return 0.5 * dice(y_true, y_pred) + 0.5 * cross_entropy(y_true, y_pred)


def main():
    keras.utils.set_random_seed(1)
    x, y = make_data(133, seed=0)
    model = make_model()
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=dice_and_cross_entropy,
        metrics=[keras.metrics.BinaryIoU(target_class_ids=[0, 1], name="iou")],
    )
    history = model.fit(
        x,
        y,
        batch_size=18,
        epochs=3,
        shuffle=False,
        validation_data=make_data(41, seed=1),
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
