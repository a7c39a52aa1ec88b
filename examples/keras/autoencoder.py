"""A convolutional autoencoder: the target is the input, the encoder is kept."""

import sys

import keras
import numpy as np
from keras import layers


def make_images(rows):
    """Return images of soft spots at random places."""
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(np.arange(8), np.arange(8)), axis=-1)
    centres = rng.uniform(1, 7, size=(rows, 1, 1, 2))
    distance = ((grid - centres) ** 2).sum(axis=-1, keepdims=True)
    return np.exp(-distance / 4).astype("float32")


def main():
    keras.utils.set_random_seed(1)
    images = make_images(397)

    encoder = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(8, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(4, name="code"),
        ]
    )
    decoder = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(2 * 2 * 8, activation="relu"),
            layers.Reshape((2, 2, 8)),
            layers.Conv2DTranspose(8, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2DTranspose(
                1, 3, strides=2, padding="same", activation="sigmoid"
            ),
        ]
    )
    inputs = keras.Input((8, 8, 1))
    autoencoder = keras.Model(inputs, decoder(encoder(inputs)))
    autoencoder.compile(
        optimizer=keras.optimizers.Nadam(2e-3),
        loss="binary_crossentropy",
        metrics=[keras.metrics.RootMeanSquaredError()],
    )
    history = autoencoder.fit(
        images,
        images,
        batch_size=36,
        epochs=4,
        shuffle=False,
        validation_split=0.15,
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")
    codes = encoder.predict(images, batch_size=70, verbose=0)
    print(f"spread_of_codes: {' '.join(f'{s:.9g}' for s in codes.std(axis=0))}")
    if len(sys.argv) > 1:
        autoencoder.save(sys.argv[1])
    return autoencoder


if __name__ == "__main__":
    main()
