"""A training with some features, by us and by stock Keras, and the differences.

The model has layers, data and options only for the given features. All is in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import collective
from collective.training.observers.ledger.verify import check as check_ledger
from collective.training.preparation.compatibility import FEATURES
from collective.training.process.object_collectives import broadcast_object
from tests import launch
from tests.training.compression.everything import Everything
from tests.training.small import on_rank_zero
from tests.training.test_equivalence import together

NAME = os.environ.get(launch.BACKEND, "single")
ROWS, BATCH, COLUMNS, EPOCHS = 23, 8, 4, 2  # batches of 8, 8 and 7 rows
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 2},
    "shard_optimizer": {"shard_optimizer": True},
    "shard_weights": {"shard_weights": True},
    "virtual_replicas": {"virtual_replicas": 3},
    "hook": {"hook": Everything()},
}
#: Features of the table for a training in these processes, in its order; and more.
TRAINED = (
    *[name for name in FEATURES if name in {*OPTIONS, "own_step", "loss_scale"}],
    *("coupled", "normalized", "look_ups", "checkpoint", "ledger", "batches"),
)


def couples(y: Any, p: Any) -> Any:
    """Return a loss that depends on all rows at once: a mean of means would differ."""
    return ops.mean(ops.square(y - p)) + ops.square(ops.mean(p)) / (
        1 + ops.mean(ops.square(y))
    )


class OwnStep(keras.Model):
    """An ordinary step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables, strict=True)
        )
        return {"loss": loss}


def make(features: set[str]) -> keras.Model:
    keras.utils.set_random_seed(5)
    given = keras.Input((COLUMNS,), dtype="int32" if "look_ups" in features else None)
    x = given
    if "look_ups" in features:
        x = keras.layers.Flatten()(keras.layers.Embedding(5, 3)(x))
    x = keras.layers.Dense(6, activation="tanh")(x)
    if "normalized" in features:
        x = keras.layers.BatchNormalization()(x)
    kind = OwnStep if "own_step" in features else keras.Model
    model = kind(given, keras.layers.Dense(2)(x))
    optimizer: Any = keras.optimizers.Adam(0.05)
    if "batches" in features:  # there Keras counts a step too many, and Adam uses it
        optimizer = keras.optimizers.RMSprop(0.05)
    if "loss_scale" in features:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
    model.compile(optimizer, loss=couples if "coupled" in features else "mse")
    return model


def data(features: set[str]) -> tuple[Any, ...]:
    rng = np.random.default_rng(2)
    x: np.ndarray = rng.normal(size=(ROWS, COLUMNS))
    if "look_ups" in features:
        x = rng.integers(0, 5, x.shape).astype("int32")
    y = rng.normal(size=(ROWS, 2))
    if "batches" not in features:
        return x, y
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    return (whole.filter(lambda *_: True),)


def stock(features: set[str]) -> list[np.ndarray]:
    """Return the variables after Keras' own training."""
    keras.utils.clear_session(free_memory=False)
    model = make(features)
    size = {} if "batches" in features else {"batch_size": BATCH}
    model.fit(*data(features), epochs=EPOCHS, shuffle=False, verbose=0, **size)
    return state(model)


def state(model: keras.Model) -> list[np.ndarray]:
    return [np.array(v) for v in model.variables if "seed_generator" not in v.path]


def ours(features: set[str], backend: Any, folder: Path) -> list[np.ndarray]:
    """Return the variables after our training; with a checkpoint, in two trainings."""
    words: dict[str, Any] = {"backend": backend, "shuffle": False, "verbose": 0}
    for name in features & set(OPTIONS):
        words |= OPTIONS[name]
    if "batches" not in features:
        words["batch_size"] = BATCH
    if "ledger" in features:
        words["ledger"] = folder / "rows.ledger"

    def run(**more: Any) -> keras.Model:
        keras.utils.clear_session(free_memory=False)  # this ends scopes
        with backend.scope():
            model = make(features)
        train: Callable[[], Any] = lambda: collective.fit(  # noqa: E731
            model, *data(features), epochs=EPOCHS, **words, **more
        )
        together(backend, train)
        return model

    if "checkpoint" in features:
        kept = folder / "state"
        run(checkpoint=collective.Checkpoint(kept, every=1), steps=4)
        model = run(checkpoint=collective.Checkpoint(kept, resume=True))
    else:
        model = run()
    if "ledger" in features and backend.rank == 0:
        assert check_ledger(words["ledger"]).faults == []
    return state(model)


def differences(features: set[str], backend: Any, folder: Path) -> list[str]:
    """Return differences beyond rounding; empty if there are none."""
    if backend.size > 1:
        folder = Path(broadcast_object(backend, str(folder)))
    wanted = on_rank_zero(backend, lambda: stock(features))
    got = ours(features, backend, folder)
    return [
        f"{place}: {np.abs(one - other).max()}"
        for place, (one, other) in enumerate(zip(got, wanted, strict=True))
        if not np.allclose(one, other, rtol=1e-12, atol=1e-12)
    ]
