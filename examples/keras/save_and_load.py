"""Saves a model in the middle of its training, loads it, and continues."""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers


def main():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(331, 9)).astype("float32")
    y = np.sin(x).sum(axis=1, keepdims=True) + x[:, :1] * x[:, 1:2]

    model = keras.Sequential(
        [
            keras.Input((9,)),
            layers.Dense(24, activation="relu"),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    options = dict(batch_size=40, shuffle=False, verbose=2)
    first = model.fit(x, y, epochs=2, **options)
    print(f"first_loss: {' '.join(f'{v:.9g}' for v in first.history['loss'])}")

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.keras"
        model.save(file)
        del model
        model = keras.models.load_model(file)

    # The file has the optimizer, too: its moments and the number of steps.
    print(f"steps: {int(model.optimizer.iterations)}")
    second = model.fit(x, y, epochs=4, initial_epoch=2, **options)
    print(f"second_epochs: {' '.join(str(e) for e in second.epoch)}")
    for name, values in second.history.items():
        print(f"{name}: {' '.join(f'{v:.9g}' for v in values)}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
