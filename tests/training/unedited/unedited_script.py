"""An ordinary Keras script, as its author wrote it: without ranks and seeds for data."""

import json
import os
import sys

import keras
import numpy as np
from tensorflow import keras as tf_keras

FOLDER = sys.argv[1]
os.makedirs(os.path.join(FOLDER, "made"))

keras.utils.set_random_seed(3)
x = np.random.normal(size=(203, 6)).astype("float32")
y = np.sin(x @ np.arange(6.0)).astype("float32")[:, None]
x_test, y_test = x[:37] * 1.5, y[:37]


class Noted(keras.callbacks.Callback):
    """Calls Keras from a callback, and writes a file."""

    def on_epoch_end(self, epoch, logs=None):
        shape = self.model.predict(x[:3], verbose=0).shape
        with open(os.path.join(FOLDER, "epochs.txt"), "a") as file:
            file.write(f"{epoch} {shape}\n")


class Net(tf_keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(16, "tanh")
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


def sequential():
    return keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])


def functional():
    inputs = tf_keras.Input((6,))
    hidden = tf_keras.layers.Dense(16, "tanh")(inputs)
    return tf_keras.Model(inputs, tf_keras.layers.Dense(1)(hidden))


if __name__ == "__main__":
    found = {}
    for kind in (sequential, functional, Net):
        model, name = kind(), kind.__name__
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
        best = os.path.join(FOLDER, f"{name}.best.weights.h5")
        history = model.fit(
            x,
            y,
            batch_size=48,
            epochs=3,
            shuffle=False,
            validation_data=(x_test, y_test),
            verbose=2,
            callbacks=[
                keras.callbacks.ModelCheckpoint(
                    best, "val_loss", save_best_only=True, save_weights_only=True
                ),
                keras.callbacks.EarlyStopping("loss", patience=1, min_delta=-1),
                Noted(),
            ],
        )
        path = os.path.join(FOLDER, f"{name}.keras")
        if kind is not Net:
            model.save(path)
            loaded = tf_keras.models.load_model(path)
        else:
            model.save_weights(path.replace(".keras", ".weights.h5"))
            loaded = model
        again = loaded.fit(x[:100], y[:100], 20, epochs=1, shuffle=False, verbose=0)
        found[name] = {
            "history": history.history,
            "epoch": history.epoch,
            "again": again.history,
            "evaluated": loaded.evaluate(x_test, y_test, batch_size=16, verbose=0),
            "predicted": loaded.predict(x_test, batch_size=10, verbose=0).tolist(),
            "weights": [w.tolist() for w in loaded.get_weights()],
            "best": os.path.exists(best),
        }
        model.load_weights(best)
    print("RESULT", json.dumps(found))
    print("done")
