"""A small network on arrays: fit with validation data, evaluate, predict."""

import sys

import keras
import numpy as np
from keras import layers


def make_data(rows, seed):
    """Return points of four classes that a line does not separate."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 12)).astype("float32")
    y = (x[:, 0] * x[:, 1] > 0) + 2 * (x[:, 2] > x[:, 3])
    return x, y.astype("int32")


def main():
    keras.utils.set_random_seed(1)
    x_train, y_train = make_data(601, seed=0)
    x_test, y_test = make_data(149, seed=1)

    model = keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(48, activation="relu", kernel_regularizer="l2"),
            layers.Dense(24, activation="relu"),
            layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    history = model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=4,
        shuffle=False,
        validation_data=(x_test, y_test),
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {values[-1]:.9g}")

    loss, accuracy = model.evaluate(x_test, y_test, batch_size=50, verbose=0)
    print(f"test_loss: {loss:.9g}")
    print(f"test_accuracy: {accuracy:.9g}")
    probabilities = model.predict(x_test, batch_size=40, verbose=0)
    print(f"agrees: {np.mean(probabilities.argmax(1) == y_test):.9g}")
    print(f"first_row: {' '.join(f'{p:.9g}' for p in probabilities[0])}")

    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
