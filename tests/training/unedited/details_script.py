"""An ordinary script with habits that ranks can stumble over: as ``python`` runs it.

Prints what each part has found, of every rank, for ``test_details`` to compare.
"""

import json
import random
import sys

import keras
import numpy as np

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
    """Is read after the training, and draws random numbers."""

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
    """Those that fail do not end the search."""
    candidates = {
        "shape": lambda: model(5),
        "layer": lambda: model(4, Refuses()),
        "callback": lambda: model(),
        "not compiled": lambda: keras.Sequential([keras.layers.Dense(1)]),
        "good": lambda: model(),
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


for part in (architectures, not_finite, callbacks):
    found[part.__name__] = part()
print("FOUND", json.dumps(found), file=sys.stderr, flush=True)
