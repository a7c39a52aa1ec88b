"""How ``fit``, ``evaluate`` and ``predict`` run models made in a strategy's scope."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.training import keras_compat


def strategy_of(model: Any) -> Any:
    """Return our strategy in whose scope a model was made; None if there is none."""
    strategy = getattr(model, "distribute_strategy", None)
    ours = isinstance(model, keras.Model) and hasattr(strategy, "fit_backend")
    return strategy if ours else None


def backend_for(model: Any, backend: str | Backend) -> str | Backend:
    """Return the backend that trains a model: its strategy's, else the given one.

    Makes variables that replicas have written equal on all ranks; every rank calls it.
    """
    strategy = strategy_of(model)
    if strategy is None:
        return backend
    strategy.extended.average_written()
    if _runs_as_one_process(model, strategy):
        return strategy.backend
    return strategy.fit_backend


def _runs_as_one_process(model: keras.Model, strategy: tf.distribute.Strategy) -> bool:
    """Return whether a model has its own step, and the process one replica of it."""
    own = any(
        keras_compat.model.overrides(model, m) for m in ("train_step", "test_step")
    )
    return own and len(strategy.extended.worker_devices) == 1


@contextlib.contextmanager
def as_one_process(model: Any) -> Iterator[None]:
    """Enter this on every rank around ``fit`` and ``evaluate`` by a model's own step.

    Such a step is written for one process, and its sums over replicas are made when it
    uses them. Inside, the strategy has one replica and the model's variables are plain,
    so a step that divides by the number of replicas, or calls ``all_reduce`` in its
    replica context, computes the same as in one process.

    The step of another model is partitioned, and writes whole values.
    """
    strategy = strategy_of(model)
    if strategy is None:
        yield
        return
    if not _runs_as_one_process(model, strategy):
        with strategy.extended.reading_first():
            yield
        return
    extended = strategy.extended
    with extended.as_one_replica(), keras_compat.one_copy.one_copy(model, strategy):
        yield
