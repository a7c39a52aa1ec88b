"""Trainings, in each of which a rank dies; the last rank compares them with Keras.

    collectiverun -np 4 --min-np 1 python ranks_features.py

The first has a ``train_step`` with two updates, and a rank dies between them. The second
has batches of a generator that draws from NumPy, and the last rank dies. The third has a loss
of the whole batch, batch normalization and the gradient of each look-up, and
rank 0 dies.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import collective
from collective import backends
from tests.training import pairs

DIES_AT = 4  # of 6 steps
CALLS: list[int] = []
HARD = {"coupled", "normalized", "look_ups"}


class TwoUpdates(keras.Model):
    """Makes two updates, of which the second sees the changes of the first."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        variables = self.trainable_variables
        for number in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            if number == 0:
                tf.numpy_function(between, [], [], stateful=True)
        return {"loss": loss}


class Dies(keras.callbacks.Callback):
    """Kills rank 0, which runs the callbacks."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if int(np.array(self.model.optimizer.iterations)) == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def own_step() -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    given = keras.Input((pairs.COLUMNS,))
    hidden = keras.layers.Dense(6, activation="tanh")(given)
    model = TwoUpdates(given, keras.layers.Dense(2)(hidden))
    model.compile(keras.optimizers.Adam(0.05), loss="mse")
    return model


def between() -> None:
    """Kill a rank between updates; ranks compare this code, so the environment names it."""
    CALLS.append(1)
    if len(CALLS) == DIES_AT and "DYING" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)


def drawn(dies: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield uneven batches.

    With ``dies``, the rank ends when batch 15 is read, some steps ahead.
    """
    np.random.seed(7)
    for number in itertools.count():
        if dies and number == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        rows = 7 + number % 2
        yield (
            np.random.normal(size=(rows, pairs.COLUMNS)),
            np.random.normal(size=(rows, 2)),
        )


def compare(name: str, model: keras.Model, wanted: keras.Model) -> None:
    for got, value in zip(pairs.state(model), pairs.state(wanted), strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-12, atol=1e-12, err_msg=name)
    print(f"{name}: as stock Keras", flush=True)


def main() -> None:
    keras.config.set_floatx("float64")
    backend = backends.get("native", backends.Options(min_np=1))
    words = {"batch_size": pairs.BATCH, "epochs": pairs.EPOCHS, "shuffle": False}
    words["verbose"] = 0
    data = pairs.data(set())
    first = own_step()
    if backend.rank == backend.size - 1:
        os.environ["DYING"] = "1"
    collective.fit(first, *data, backend=backend, verify=False, **words)
    assert backend.size == 3
    batches = pairs.make({"batches"})
    endless = {"epochs": 2, "steps_per_epoch": 10, "verbose": 0}
    last = backend.rank == backend.size - 1
    collective.fit(batches, drawn(last), backend=backend, **endless)
    assert backend.size == 2
    rows = pairs.data(HARD)
    second = pairs.make(HARD)
    collective.fit(
        second,
        *rows,
        backend=backend,
        callbacks=[Dies()],
        **words,
    )
    assert backend.size == 1
    wanted = own_step()
    wanted.fit(*data, **words)
    compare("own step", first, wanted)
    wanted = pairs.make({"batches"})
    wanted.fit(drawn(False), **endless)
    compare("batches", batches, wanted)
    wanted = pairs.make(HARD)
    wanted.fit(*rows, **words)
    compare("hard", second, wanted)


if __name__ == "__main__":
    main()
