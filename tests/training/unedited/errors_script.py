"""Errors of a script's own code, in each call and at several batches; the last ends it.

python errors_script.py                      # catches all but the last
python errors_script.py fit loss             # raises this one alone
python errors_script.py fit loss collective  # by collective.fit
"""

from __future__ import annotations

import functools
import sys
import time

import keras
import numpy as np
import tensorflow as tf

BATCHES = 8
CALLS = {
    "fit": ("callback", "dataset", "generator"),
    "evaluate": ("callback", "dataset", "generator"),
    "predict": ("callback", "dataset", "generator"),
    "train_on_batch": ("script",),
}


class Own(Exception):
    """The error."""


class Callback(keras.callbacks.Callback):
    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def hit(self, batch, logs=None):
        if batch == self.at:
            raise Own("of the callback")

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = hit


class Rows(keras.utils.PyDataset):
    def __init__(self, at: int):
        super().__init__()
        self.at = at

    def __len__(self):
        return BATCHES

    def __getitem__(self, number):
        if number == self.at:
            raise Own("of the data")
        return batch(number)


class Model(keras.Sequential):
    bad = (
        -1.0
    )  # the step fails with targets of at least this number, if it is not negative

    def train_step(self, data):
        if self.bad >= 0:
            most = tf.reduce_max(tf.cast(data[1], tf.float32))
            tf.debugging.assert_less(most, self.bad)
        return super().train_step(data)


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.full((8, 2), number / BATCHES)
    return x, x[:, :1]


def generator(at: int):
    for number in range(BATCHES):
        if number == at:
            raise Own("of the generator")
        yield batch(number)


def model(bad: float = -1.0, loss="mse") -> keras.Model:
    made = Model([keras.Input((2,)), keras.layers.Dense(1)])
    made.bad = bad
    made.compile("sgd", loss)
    return made


def run(call: str, where: str, at: int, package: str = "keras") -> None:
    """Make a call that fails at a batch, by a method of Keras or by ``collective``."""
    if where == "loss":

        def loss(y, p):
            tf.debugging.assert_less(tf.reduce_max(y), tf.cast(at / BATCHES, y.dtype))
            return keras.losses.mean_squared_error(y, p)

        model(loss=loss).fit(generator(-1), verbose=0)
    elif where == "step":
        model(at / BATCHES).fit(generator(-1), verbose=0)
    elif call == "train_on_batch":
        made = model()
        for number in range(BATCHES):
            made.train_on_batch(*batch(number))
            if number == at:
                raise Own("of the script")
    else:
        data = Rows(at) if where == "dataset" else generator(-1)
        data = generator(at) if where == "generator" else data
        more = {"callbacks": [Callback(at)]} if where == "callback" else {}
        made = model()
        method = getattr(made, call)
        if package == "collective":
            import collective

            method = functools.partial(getattr(collective, call), made)
        method(data, verbose=0, **more)


def main() -> None:
    """Print what each case raises; end with an error that nothing catches."""
    if len(sys.argv) > 1:
        print("RAISES", time.time(), flush=True)
        run(sys.argv[1], sys.argv[2], 6, *sys.argv[3:])
    for call, places in CALLS.items():
        for where in places:
            for at in (0, 6, BATCHES - 1):
                try:
                    run(call, where, at)
                    print(call, where, at, "nothing")
                except Exception as error:
                    print(call, where, at, type(error).__name__)
    print("RAISES", time.time(), flush=True)
    run("fit", "callback", BATCHES - 1)


if __name__ == "__main__":
    main()
