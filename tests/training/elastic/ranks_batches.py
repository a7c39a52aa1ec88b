"""Trainings under Keras' own ``fit`` whose ranks change; run by ``test_batches``.

    ranks_batches.py dies KIND SHARE...
    ranks_batches.py grows KIND FOLDER

``dies``: for each share, one of the remaining ranks kills itself after that share of its
exchanges beside the steps. ``grows``: rank 0 is asked to leave, and another rank joins. KIND
is that of the data. Each time, the result is that of an undisturbed training.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import collective
from collective import backends, session
from collective.training import Checkpoint
from tests.training.elastic import exchanges
from tests.training.small import BATCH, PER_EPOCH, everything, rows, state

EPOCHS = 3
TOLD_AT = 4
# The step after which a rank joins, by the kind of the data: at the end of an epoch, too.
JOINED_AT = {"arrays": 11, "dataset": 8, "items": 14, "generator": 11}


class Items(keras.utils.PyDataset):
    """Batches by number."""

    @property
    def num_batches(self) -> int:
        return PER_EPOCH

    def __getitem__(self, index: int) -> Any:
        x, y = rows()
        here = slice(index * BATCH, (index + 1) * BATCH)
        return x[here], y[here]


def drawn() -> Iterator[Any]:
    items = Items()
    while True:
        yield from (items[index] for index in range(PER_EPOCH))


def data(kind: str) -> dict[str, Any]:
    """Return arguments of ``fit``; all kinds but arrays have the same batches."""
    x, y = rows()
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    if kind == "dataset":
        whole = tf.data.Dataset.from_tensor_slices((x, y))
        return {"x": whole.shuffle(20, seed=4).batch(BATCH)}
    if kind == "items":
        return {"x": Items()}
    return {"x": drawn(), "steps_per_epoch": PER_EPOCH}


class Decays(keras.callbacks.Callback):
    """Changes weights after each epoch, and counts on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ended += 1
        for weight in self.model.trainable_weights:
            weight.assign(weight * 0.9)


class ComesAndGoes(keras.callbacks.Callback):
    """Asks rank 0 to leave; then holds its successor until a new rank waits."""

    def __init__(self, kind: str):
        super().__init__()
        self.joined_at = JOINED_AT[kind]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = int(self.model.optimizer.iterations.numpy())
        if done == TOLD_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        while done == self.joined_at and not session.waiting():
            time.sleep(0.01)


def train(backend: Any, kind: str, *more: Any, **options: Any) -> list[Any]:
    """Return losses, history and weights."""
    exchanges.made = 0
    keras.utils.set_random_seed(3)
    stops = keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
    result = collective.fit(
        everything(),
        **data(kind),
        epochs=EPOCHS,
        validation_data=rows(17, seed=2),
        validation_batch_size=7,
        callbacks=[Decays(), stops, *more],
        backend=backend,
        seed=5,
        verbose=0,
        **options,
    )
    shown = [result.history[name] for name in sorted(result.history)]
    return [np.array(result.losses), *map(np.array, shown), *state(result.model)]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-12)


def dies(backend: Any, kind: str, shares: list[str]) -> None:
    """Have ranks die, one in each training."""
    exchanges.count()
    whole = train(backend, kind)
    for number, share in enumerate(map(float, shares)):
        train(backend, kind)  # with fewer ranks fewer exchanges
        last = exchanges.made
        is_victim = backend.rank == number % backend.size
        exchanges.deadly = 1 + int(share * (last - 1)) if is_victim else 0
        found = train(backend, kind)
        exchanges.deadly = 0
        assert_same(found, whole)
        print(f"rank {backend.rank} of {backend.size}: same after {share} of {last}")


def grows(backend: Any, kind: str, folder: str) -> None:
    """Have a rank leave, and another one join."""
    options: dict[str, Any] = {}
    if kind == "arrays":
        options["checkpoint"] = Checkpoint(Path(folder, "runs"), every=4)
    whole = [] if backend.joins else train(backend, kind)
    found = train(backend, kind, ComesAndGoes(kind), **options)
    if backend.rank == 0:
        assert_same(found, whole)
    assert_same(found, [backend.broadcast_array(np.array(value)) for value in found])
    print(f"rank {backend.rank} of {backend.size}: same")


if __name__ == "__main__":
    keras.config.set_floatx("float64")
    job = backends.get("native", backends.Options(min_np=1))
    way, what, *words = sys.argv[1:]
    if way == "dies":
        dies(job, what, words)
    else:
        grows(job, what, *words)
