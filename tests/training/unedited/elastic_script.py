"""An ordinary Keras script that writes files, by relative paths, in the working directory.

Its ranks die at the places in the variable DEATHS: ``step20:0,test3:1`` is rank 0 after step 20
and rank 1 at the third batch of some data; ``leaves`` is SIGTERM. Without it, this is an
ordinary script.
"""

import itertools
import json
import os
import signal

import keras
import numpy as np
import tensorflow as tf

keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
x = np.random.normal(size=(103, 6))
y = np.sin(x @ np.arange(6.0))[:, None]


def dies(place, number=signal.SIGKILL):
    rank = os.environ.get("COLLECTIVE_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    if f"{place}:{rank}" in os.environ.get("DEATHS", "").split(","):
        os.kill(os.getpid(), number)


class Doubled(keras.layers.Layer):
    """A layer that is traced on every rank when a training begins."""

    def call(self, x):
        dies("begin")
        return 2.0 * x


class Seen(keras.callbacks.Callback):
    """Keeps a record that other callbacks do not have."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.numpy())
        dies(f"step{step}")
        dies(f"leaves{step}", signal.SIGTERM)

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(epoch)


def batches(name):
    """Return a data set of unknown length, from a function of the script."""
    read_ones = itertools.count()

    def read():
        for number in range(6):
            dies(f"{name}{next(read_ones)}")
            rows = slice(number * 17, number * 17 + 17)
            yield x[rows], y[rows]

    specs = [tf.TensorSpec((None, size), tf.float64) for size in (6, 1)]
    return tf.data.Dataset.from_generator(read, output_signature=tuple(specs))


if __name__ == "__main__":
    log = open("log.txt", "w")  # noqa: SIM115
    print("begin", file=log, flush=True)
    layers = keras.layers
    first = [keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dropout(0.2)]
    model = keras.Sequential([*first, Doubled(), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    seen = Seen()
    stops = keras.callbacks.EarlyStopping(patience=3, min_delta=0.1)
    stops.restore_best_weights = True
    history = model.fit(
        x, y, batch_size=16, epochs=9, validation_data=(x[:40], y[:40]), verbose=2,
        callbacks=[
            seen, stops,
            keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=0.1),
            keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
            keras.callbacks.CSVLogger("epochs.csv"),
        ],
    )  # fmt: skip
    print("fitted", file=log)
    best = keras.models.load_model("best.keras", {"Doubled": Doubled})
    dies("between")
    tested = model.evaluate(batches("test"), verbose=0)

    # There are no random layers, because Keras draws for an empty batch after such data.
    plain = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh")])
    plain.add(layers.Dense(1))
    plain.compile(keras.optimizers.RMSprop(0.02), "mse")
    again = plain.fit(batches("data"), epochs=3, verbose=0)
    dies("save")
    plain.save("plain.keras")
    plain.save("old.keras")
    os.remove("old.keras")
    predicted = plain.predict(x, batch_size=20, verbose=0)
    np.save("predicted.npy", predicted)
    print("end", file=log)
    log.close()
    found = {
        "history": history.history, "again": again.history, "tested": tested,
        "seen": seen.seen, "best": stops.best_epoch, "drawn": np.random.rand(3).tolist(),
        "weights": [w.tolist() for w in (*model.get_weights(), *plain.get_weights())],
        "kept": [w.tolist() for w in best.get_weights()],
        "predicted": predicted.tolist(),
    }  # fmt: skip
    with open("found.json", "w") as file:
        json.dump(found, file)
    print("RESULT of", len(history.epoch), "epochs")
