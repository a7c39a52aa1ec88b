"""How ``fit``, ``evaluate`` and ``predict`` run models made in a strategy's scope."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from collective.backends.base import Backend
from collective.training import keras_compat


def strategy_of(model: Any) -> Any:
    """The strategy of ours in whose scope a model was made; None if there is none."""
    strategy = getattr(model, "distribute_strategy", None)
    ours = isinstance(model, keras.Model) and hasattr(strategy, "fit_backend")
    return strategy if ours else None


def backend_for(model: Any, backend: str | Backend) -> str | Backend:
    """The backend that trains a model: that of its strategy, else the one given.

    Makes variables that replicas have written the same on all; every rank calls it.
    """
    strategy = strategy_of(model)
    if strategy is None:
        return backend
    strategy.extended.average_written()
    if _runs_as_one_process(model, strategy):
        return strategy.backend
    return strategy.fit_backend


def _runs_as_one_process(model: keras.Model, strategy: Any) -> bool:
    """Whether a model has a step of its own, and this process one replica of it."""
    own = any(
        keras_compat.model.overrides(model, m) for m in ("train_step", "test_step")
    )
    return own and len(strategy.extended.worker_devices) == 1


@contextlib.contextmanager
def as_one_process(model: Any) -> Iterator[None]:
    """Around ``fit`` and ``evaluate`` by a step of the model's own; every rank enters it.

    Such a step is written for one process, and its sums over replicas are made where it
    uses them. Inside, the strategy has one replica and the model's variables are plain:
    so a step that divides by the number of replicas, or calls ``all_reduce`` in its
    replica context, computes what it computes in one process.
    """
    strategy = strategy_of(model)
    if strategy is None or not _runs_as_one_process(model, strategy):
        yield
        return
    extended = strategy.extended
    with extended.as_one_replica(), keras_compat.one_copy.one_copy(model, strategy):
        yield
