"""A small training through ``collective.training.fit``, and what all ranks have of it."""

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
from collective.training.object_collectives import broadcast_object
from collective.training.observers.checkpoint import schedule
from collective.training.variables import replicated_variables
from tests import launch
from tests.training.test_equivalence import together

ROWS, BATCH, FEATURES, CLASSES = 53, 10, 6, 3
PER_EPOCH = 6  # five batches of ten rows and one of three
TESTED = 17

# That replicas of one process have the numbers of one, test_equivalence shows: what is
# tried on them beside that is of the matrix.
IN_PROCESS = ("single", pytest.param("tf-mirrored:3", marks=pytest.mark.matrix))
NAMES = (os.environ[launch.BACKEND],) if launch.launched() else IN_PROCESS


def rows(count: int = ROWS, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random rows with labels that can be learned, no two alike."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(keras.config.floatx())
    return x, np.argmax(x[:, :CLASSES], axis=1).astype("int32")


def model(optimizer: Any = None, *more: Any, **arguments: Any) -> Callable[[], Any]:
    """A maker of a small network, compiled; ``more`` are layers in its middle."""

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
    """A maker of all that a state consists of; masks depend on the number of replicas.

    The statistics of a batch do, too, so there is no layer of them without dropout.
    """
    by_replica = [
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3, seed=1),
    ]
    return model(adamw, *(by_replica if dropout else []))


def train(
    backend: Any, callbacks: Any = (), validate: bool = False, **more: Any
) -> Result:
    """Four epochs of six steps, by default."""
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
    """Every rank's value, in the order of ranks, on every rank."""
    if backend.size == 1:
        return [value]
    return [broadcast_object(backend, value, root) for root in range(backend.size)]


def on_rank_zero(backend: Any, compute: Callable[[], Any]) -> Any:
    """What rank 0 computes, on every rank: Keras' own training is as long as ours."""
    value = together(backend, compute) if backend.rank == 0 else None
    return value if backend.size == 1 else broadcast_object(backend, value)


def state(trained: keras.Model) -> list[np.ndarray]:
    """Weights, layer state and optimizer state."""
    return [np.array(v) for v in replicated_variables(trained)]


def learning_rate(trained: keras.Model) -> float:
    return float(np.array(trained.optimizer.learning_rate))


def assert_ranks_agree(backend: Any, result: Result) -> None:
    """Steps, losses, history and every variable: the same bits on every rank."""
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
    """Leaves none out: a test wants to know which there are."""

    def _save(self, *arguments):
        self._not_before = 0.0
        super()._save(*arguments)
        self._thread.join()


def names(folder: Path) -> list[str]:
    """What is there, beside the lock."""
    return sorted({path.name for path in folder.glob("*")} - {schedule.LOCK})
