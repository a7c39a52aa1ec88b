"""Callbacks: a falling learning rate, an early end, checkpoints, a log, a user's own."""

import csv
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers


class Norms(keras.callbacks.Callback):
    """Keeps the norm of the first kernel at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.norms = []

    def on_epoch_end(self, epoch, logs=None):
        kernel = self.model.get_weights()[0]
        self.norms.append(float(np.linalg.norm(kernel)))
        logs["norm"] = self.norms[-1]


def main():
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(271, 10)).astype("float32")
    y = (x[:, 0] + 0.8 * rng.normal(size=271) > 0).astype("int32")
    model = keras.Sequential(
        [keras.Input((10,)), layers.Dense(64, "relu"), layers.Dense(2, "softmax")]
    )
    model.compile(
        keras.optimizers.SGD(0.2, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )

    folder = Path(tempfile.gettempdir(), "keras-callbacks")
    folder.mkdir(exist_ok=True)
    norms = Norms()
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=14,
        shuffle=False,
        validation_split=0.3,
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(factor=0.3, patience=1, min_delta=0.01),
            keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(
                folder / "best.weights.h5", save_best_only=True, save_weights_only=True
            ),
            norms,
            keras.callbacks.CSVLogger(folder / "log.csv"),
        ],
        verbose=2,
    )
    for name, values in history.history.items():
        print(f"{name}: {' '.join(f'{value:.9g}' for value in values)}")
    print(f"epochs: {len(norms.norms)}")
    with open(folder / "log.csv") as file:
        print(f"logged: {' '.join(row['val_loss'] for row in csv.DictReader(file))}")

    model.load_weights(folder / "best.weights.h5")
    loss, _ = model.evaluate(x[-81:], y[-81:], verbose=0)
    print(f"best: {loss:.9g}")
    if len(sys.argv) > 1:
        model.save(sys.argv[1])
    return model


if __name__ == "__main__":
    main()
