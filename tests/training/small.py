"""A small training through ``collective.training.fit``, and its results on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from collective.training import Checkpoint, fit
from collective.training.loop.result import Result
from collective.training.model.variables import replicated_variables
from collective.training.observers.checkpoint import schedule
from collective.training.process.object_collectives import broadcast_object
from tests import launch
from tests.training.test_equivalence import together

ROWS, BATCH, FEATURES, CLASSES = 53, 10, 6, 3
PER_EPOCH = 6  # five batches of ten rows and one of three
TESTED = 17

# test_equivalence shows that replicas of one process have the numbers of one replica; other
# tests on them are part of the matrix.
IN_PROCESS = ("single", pytest.param("tf-mirrored:3", marks=pytest.mark.matrix))
NAMES = (os.environ[launch.BACKEND],) if launch.launched() else IN_PROCESS


def rows(count: int = ROWS, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return random rows with labels that can be learned; all rows differ."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(keras.config.floatx())
    return x, np.argmax(x[:, :CLASSES], axis=1).astype("int32")


def model(optimizer: Any = None, *more: Any, **arguments: Any) -> Callable[[], Any]:
    """Return a maker of a small network, compiled; ``more`` are layers in its middle."""

    def make() -> keras.Model:
        keras.utils.set_random_seed(11)
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="tanh"),
            *more,
            keras.layers.Dense(CLASSES),
        ]
        made = keras.Sequential(layers)
        settings = {
            "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
        }
        made.compile(
            keras.optimizers.Adam(0.02) if optimizer is None else optimizer(),
            **(settings | arguments),
        )
        return made

    return make


def adamw() -> keras.Optimizer:
    return keras.optimizers.AdamW(0.02, weight_decay=0.01, use_ema=True)


def everything(dropout: bool = False) -> Callable[[], Any]:
    """Return a maker of a model with every kind of state.

    Masks and the statistics of a batch depend on the number of replicas, so a model without
    dropout has no layer with such statistics.
    """
    by_replica = [
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3, seed=1),
    ]
    return model(adamw, *(by_replica if dropout else []))


def train(
    backend: Any, callbacks: Any = (), validate: bool = False, **more: Any
) -> Result:
    """Train, for four epochs of six steps by default."""
    settings = {
        "global_batch_size": BATCH,
        "epochs": 4,
        "seed": 5,
        "verbose": 0,
    } | more
    if validate:
        settings["validation_data"] = rows(TESTED, seed=2)
    data = settings.pop("data", None)
    made = settings.pop("model", None)
    return fit(
        model() if made is None else made,
        rows() if data is None else data,
        backend=backend,
        callbacks=callbacks,
        **settings,
    )


def gather(backend: Any, value: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks, on every rank."""
    if backend.size == 1:
        return [value]
    return [broadcast_object(backend, value, root) for root in range(backend.size)]


def on_rank_zero(backend: Any, compute: Callable[[], Any]) -> Any:
    """Compute on rank 0; return the result on every rank."""
    value = together(backend, compute) if backend.rank == 0 else None
    return value if backend.size == 1 else broadcast_object(backend, value)


def state(trained: keras.Model) -> list[np.ndarray]:
    """Return weights, layer state and optimizer state."""
    return [np.array(v) for v in replicated_variables(trained)]


def learning_rate(trained: keras.Model) -> float:
    return float(np.array(trained.optimizer.learning_rate))


def assert_ranks_agree(backend: Any, result: Result) -> None:
    """Check that step, losses, history and every variable are equal in bits on all ranks."""
    mine = {
        "losses": result.losses,
        "history": result.history,
        "stop": result.model.stop_training,
    }
    results = gather(backend, mine)
    assert all(other == results[0] for other in results)
    states = gather(backend, state(result.model))
    for other in states[1:]:
        for value, wanted in zip(other, states[0], strict=True):
            np.testing.assert_array_equal(value, wanted)


class Waiting(Checkpoint):
    """Leaves no checkpoint out, so that a test knows which exist."""

    def _save(self, *arguments):
        self._not_before = 0.0
        super()._save(*arguments)
        self._thread.join()


def names(folder: Path) -> list[str]:
    """Return the names of the files except the lock."""
    return sorted({path.name for path in folder.glob("*")} - {schedule.LOCK})
