"""A script's own ``tf.distribute`` strategy, where a backend sums the gradients.

``with strategy.scope():`` has no effect then: the model's variables are ordinary ones,
or those of our own strategy. The strategy still counts its replicas, by which scripts
choose their batch size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training.keras_compat import entry_points
from collective.training.unedited.job import Job


def _kinds() -> list[type[Any]]:
    distribute = tf.distribute
    return [
        distribute.MirroredStrategy,
        distribute.MultiWorkerMirroredStrategy,
        distribute.OneDeviceStrategy,
        distribute.experimental.CentralStorageStrategy,
    ]


def replace_strategies(job: Job) -> None:
    """Takes the effect from strategies that are not the backend's own."""
    if hasattr(job.backend, "strategy"):
        _keep_when_cleared(job)
    if job.backend.size > 1 and hasattr(job.backend, "strategy"):
        _refuse(job)
        return
    for kind in _kinds():
        for name, ours in (
            ("scope", _scope),
            ("run", _run),
            ("experimental_distribute_dataset", _distribute_dataset),
        ):
            stock = getattr(kind, name)
            job.replace(kind, name, _unless_own(job, stock, ours))


def _refuse(job: Job) -> None:
    """TensorFlow crashes where a second strategy is made beside one of many workers."""

    def init(self: Any, *_: Any, **__: Any) -> None:
        raise UsageError(
            f"the script makes a {type(self).__name__}, and backend "
            f"{job.backend.name!r} has a strategy of its own",
            hint="backend native or mpi",
        )

    for kind in _kinds():
        job.replace(kind, "__init__", init)


def use_by_default(strategy: Any) -> None:
    """Has the script make its variables in our strategy, without a scope."""
    if strategy is not None or tf.distribute.has_strategy():
        tf.distribute.experimental_set_strategy(strategy)


def _keep_when_cleared(job: Job) -> None:
    """Has ``clear_session`` keep our strategy: it makes a new default graph without one."""
    stock = keras.utils.clear_session

    @functools.wraps(stock)
    def clear_session(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        use_by_default(job.backend.strategy)  # type: ignore[attr-defined]

    for place in entry_points.places_of(stock):
        job.replace(*place, clear_session)


def _unless_own(
    job: Job, stock: Callable[..., Any], ours: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is getattr(job.backend, "strategy", None):
            return stock(self, *args, **kwargs)
        return ours(job, stock, self, *args, **kwargs)

    return method


def _scope(job: Job, stock: Callable[..., Any], strategy: Any) -> Any:
    job.warn_once(
        type(strategy).__name__,
        "the script's %s has no effect: backend %r sums the gradients",
        job.backend.name,
    )
    return contextlib.nullcontext(strategy)


def _run(
    job: Job, stock: Callable[..., Any], strategy: Any, *args: Any, **kwargs: Any
) -> Any:
    """A training loop of the script's own: right on one replica, without its scope."""
    if strategy.num_replicas_in_sync > 1:
        raise UsageError(
            f"the script calls run() of a {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas: only Keras' fit, evaluate and "
            "predict can be distributed",
            hint="run the script by python itself, or use fit",
        )
    return stock(strategy, *args, **kwargs)


def _distribute_dataset(
    job: Job, stock: Callable[..., Any], strategy: Any, dataset: Any, *_: Any, **__: Any
) -> Any:
    return dataset
