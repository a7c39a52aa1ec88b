"""An ordinary script with habits that may fail on ranks; ``python`` runs it.

It prints the results of each part, on every rank, for ``test_details`` to compare.
"""

import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

FOLDER = sys.argv[1]

keras.utils.set_random_seed(1)
x = np.random.rand(32, 4).astype("float32")
y = x[:, :1]
found = {}


def model(width=4, *more):
    made = keras.Sequential([keras.Input((width,)), *more, keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


class Refuses(keras.layers.Layer):
    def call(self, inputs):
        if not isinstance(inputs, keras.KerasTensor):
            raise TypeError("of the layer")
        return inputs


class Collects(keras.callbacks.Callback):
    """Collects values for the end of the training, and draws random numbers."""

    def __init__(self, store):
        super().__init__()
        self.store = store

    def on_train_begin(self, logs=None):
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.store.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.drawn = [np.random.rand(), random.random()]


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise KeyError("of the callback")


best = 9.0


def note(epoch, logs):
    global best
    best = min(best, logs["loss"])


def architectures():
    """Search over models; those that fail do not end the search."""
    candidates = {
        "shape": lambda: model(5),
        "layer": lambda: model(4, Refuses()),
        "not compiled": lambda: keras.Sequential([keras.layers.Dense(1)]),
        "callback": lambda: model(),
    }
    seen = {}
    for name, make in candidates.items():
        callbacks = [Fails()] if name == "callback" else []
        try:
            made = make()
            seen[name] = made.fit(x, y, 8, verbose=0, callbacks=callbacks).history
        except (ValueError, TypeError, KeyError) as error:
            kinds = ValueError, TypeError, KeyError
            seen[name] = [isinstance(error, kind) for kind in kinds]
    return seen


def not_finite():
    stop = keras.callbacks.TerminateOnNaN()
    history = model().fit(x, y * np.nan, 8, epochs=3, verbose=0, callbacks=[stop])
    return np.isnan(history.history["loss"]).tolist()


def callbacks():
    trained, store = model(), []
    collects = Collects(store)
    stops = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
    notes = keras.callbacks.LambdaCallback(on_epoch_end=note)
    given = [collects, stops, notes]
    trained.fit(x, y, 8, epochs=2, verbose=0, callbacks=given)
    assert stops.model is trained
    later = [np.random.rand(), random.random()]
    return [collects.losses, collects.drawn, store, stops.best_epoch, best, later]


class Clips(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        for weight in self.model.trainable_weights:
            weight.assign(keras.ops.clip(weight, -0.1, 0.1))


def clipping_after_clear_session():
    """Train after ``clear_session``, as tuners do: the seed of the order stays."""
    keras.backend.clear_session()
    trained = model(4, keras.layers.Dense(3))
    history = trained.fit(x, y, 8, epochs=2, verbose=0, callbacks=[Clips()])
    return [history.history["loss"], [w.tolist() for w in trained.get_weights()]]


def frozen():
    """Train with layers as frozen at ``compile``; later values of ``trainable`` do not count."""
    trained = model(4, keras.layers.Dense(3), keras.layers.Dense(2))
    flags = (False, True)
    for layer, flag in zip(trained.layers, flags, strict=False):
        layer.trainable = flag
    trained.compile("sgd", "mse")
    trained.fit(x, y, 8, verbose=0)
    for layer, flag in zip(trained.layers, flags, strict=False):
        layer.trainable = not flag
    losses = trained.fit(x, y, 8, verbose=0).history["loss"]
    assert [layer.trainable for layer in trained.layers[:2]] == [True, False]
    return [losses, [w.tolist() for w in trained.get_weights()]]


class Draws(keras.layers.Layer):
    def call(self, inputs):
        return inputs * np.random.rand()


def constants():
    """Train with numbers that are drawn while Keras traces."""
    return [model(4, Draws()).fit(x, y, 8, verbose=0).history["loss"], np.random.rand()]


def files():
    """Write, remove and rename files on every rank; use a cache, too."""
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    rows = rows.cache(os.path.join(FOLDER, "cache")).batch(8)
    path, logs = os.path.join(FOLDER, "a.txt"), os.path.join(FOLDER, "logs")
    if os.path.exists(logs):
        shutil.rmtree(logs)
    os.makedirs(logs)
    trained = model()
    csv = keras.callbacks.CSVLogger(os.path.join(logs, "l"))
    history = trained.fit(rows, epochs=2, verbose=0, callbacks=[csv])
    losses = history.history["loss"]
    for _ in range(2):
        with open(path, "w") as file:
            file.write("a")
        os.rename(path, path + "b")
        with open(path + "b") as file:
            assert file.read() == "a"
        Path(path + "b").unlink()
    saved = os.path.join(FOLDER, "m.weights.h5")
    trained.save_weights(saved)
    trained.load_weights(saved)
    os.remove(saved)
    try:
        os.remove(saved)
    except FileNotFoundError:
        losses.append(1.0)
    assert os.listdir(logs) == ["l"]
    shutil.rmtree(logs)
    return [losses, sorted(n for n in os.listdir(FOLDER) if "cache" not in n)]


class Summarizes(keras.layers.Layer):
    def call(self, inputs):
        tf.summary.scalar("sum", tf.reduce_sum(inputs))
        return inputs


class Records(keras.callbacks.Callback):
    """Only records, so rank 0 alone has it, but it calls Keras, too."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.save_weights(os.path.join(FOLDER, "recorded.weights.h5"))
        self.recorded = float(self.model.predict(x, verbose=0).sum())


Records.__module__ = "wandb.keras"


def recorders():
    trained = model(4, Summarizes())
    board = keras.callbacks.TensorBoard(
        os.path.join(FOLDER, "board"), update_freq=1, embeddings_freq=1
    )
    history = trained.fit(
        x, y, 8, epochs=2, verbose=0, callbacks=[Records(), board], shuffle=False
    )
    # Rank 0 alone writes events of the steps: four of the training, none validates.
    written = list(Path(FOLDER, "board", "train").glob("events*"))
    assert len(written) == 1, written
    return history.history["loss"]


def temporary_folders():
    """A rank that is late reads what it has logged into a folder that ends with its object."""

    def logged(late):
        folder = tempfile.TemporaryDirectory(dir=FOLDER)
        log = os.path.join(folder.name, "log")
        logger = keras.callbacks.CSVLogger(log)
        model().fit(x, y, epochs=1, verbose=0, callbacks=[logger], shuffle=False)
        time.sleep(0.3 * (os.environ.get("COLLECTIVE_RANK") == late))
        assert os.path.exists(log)
        return folder.name, Path(log).read_text().split()[0]

    (first, text), *_ = map(logged, "0101")
    assert not os.path.exists(first)
    return text


class FailsLate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError


def copies():
    """The callback copies its files before it writes them anew."""
    backup = keras.callbacks.BackupAndRestore(
        os.path.join(FOLDER, "backup"), double_checkpoint=True
    )
    trained = model()
    with contextlib.suppress(RuntimeError):
        trained.fit(x, y, epochs=4, verbose=0, callbacks=[backup, FailsLate()])
    return trained.fit(x, y, epochs=4, verbose=0, callbacks=[backup]).epoch


for part in (
    architectures,
    not_finite,
    callbacks,
    clipping_after_clear_session,
    frozen,
    constants,
    files,
    recorders,
    temporary_folders,
    copies,
):
    found[part.__name__] = part()
print("FOUND", json.dumps(found), file=sys.stderr, flush=True)
