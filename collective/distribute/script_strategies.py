"""A script's own ``tf.distribute`` strategies: they become ours, over the job's backend.

``tf.distribute.MirroredStrategy()`` in a script is a ``collective.distribute.Strategy``
whose replicas are the ranks. With a backend that is made of a strategy of TensorFlow's own,
the script's strategies are that one: its replicas are the devices of ``--devices``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from collective.distribute.strategy import Strategy
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat import entry_points
from collective.training.unedited.script_job import ScriptJob

_LIBRARIES = ("keras", "tensorflow", "tf_keras", "collective")


def _kinds() -> dict[type[Any], bool]:
    """Return the strategies that become ours, and whether each is of one host's devices."""
    distribute = tf.distribute
    return {
        distribute.MirroredStrategy: True,
        distribute.MultiWorkerMirroredStrategy: False,
        distribute.OneDeviceStrategy: True,
        distribute.experimental.CentralStorageStrategy: True,
    }


def _others() -> list[type[Any]]:
    """Return the strategies that cannot become ours."""
    distribute = tf.distribute
    return [distribute.TPUStrategy, distribute.experimental.ParameterServerStrategy]


def replace_strategies(job: ScriptJob) -> None:
    """Have the constructors of TensorFlow's strategies, and ``get_strategy``, give ours."""
    if hasattr(job.backend, "strategy"):
        _keep_when_cleared(job)
        for kind in (float, int):
            read = keras_compat.one_copy.number_of(kind)
            job.replace(keras.Variable, f"__{kind.__name__}__", read)
        init = _becomes_the_one(job)
        for strategy in _kinds():
            job.replace(strategy, "__init__", init)
        return
    for kind, one_host in _kinds().items():
        job.replace(kind, "__init__", _becomes_ours(job, one_host))
    if job.backend.size > 1:
        _refuse_others(job)
    job.replace(tf.distribute, "get_strategy", _get_strategy(job))


def _refuse_others(job: ScriptJob) -> None:
    def init(self: Any, *_: Any, **__: Any) -> None:
        raise UsageError(
            f"the script makes a {type(self).__name__}, which backend "
            f"{job.backend.name!r} cannot run: its replicas are the ranks of the job",
            hint="tf.distribute.MirroredStrategy() in the script, and backend native or "
            "mpi",
        )

    for kind in _others():
        job.replace(kind, "__init__", init)


def _becomes_ours(job: ScriptJob, one_host: bool) -> Callable[..., None]:
    """Return what replaces the ``__init__`` of a strategy of TensorFlow's."""

    def init(self: Any, *_: Any, **__: Any) -> None:
        self.__class__ = Strategy
        _open(job, self, one_host)

    return init


def _open(job: ScriptJob, strategy: Strategy, one_host: bool) -> None:
    strategy.open(job.backend, None, one_host)
    job.used.add("a strategy")
    made = weakref.ref(strategy)

    @contextlib.contextmanager
    def reading_locally() -> Iterator[None]:
        found = made()
        if found is None:
            yield
            return
        found.extended.average_written()
        with found.extended.reading_locally():
            yield

    job.around_writes.append(reading_locally)


def _get_strategy(job: ScriptJob) -> Callable[[], Any]:
    """Return our strategy to the script, but not to Keras, outside a scope."""
    stock = tf.distribute.get_strategy

    @functools.cache
    def by_default() -> Strategy:
        strategy = object.__new__(Strategy)
        _open(job, strategy, one_host=True)
        return strategy

    @functools.wraps(stock)
    def get_strategy() -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
        if tf.distribute.has_strategy() or caller in _LIBRARIES:
            return stock()
        return by_default()

    return get_strategy


def _becomes_the_one(job: ScriptJob) -> Callable[..., None]:
    """Return what replaces the ``__init__`` of a strategy, where the job has one already.

    TensorFlow lets nobody enter the scope of another strategy within a scope.
    """
    strategy = job.backend.strategy  # type: ignore[attr-defined]

    class SameStrategy(type(strategy)):  # type: ignore[misc]
        def scope(self) -> Any:
            return strategy.scope()

    def init(self: Any, *_: Any, **__: Any) -> None:
        self.__class__ = SameStrategy
        tf.distribute.Strategy.__init__(self, strategy.extended)

    return init


def use_by_default(strategy: Any) -> None:
    """Have the script make its variables in our strategy, without a scope."""
    if strategy is not None or tf.distribute.has_strategy():
        tf.distribute.experimental_set_strategy(strategy)


def _keep_when_cleared(job: ScriptJob) -> None:
    """Have ``clear_session`` keep our strategy: it makes a new default graph without one."""
    stock = keras.utils.clear_session

    @functools.wraps(stock)
    def clear_session(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        use_by_default(job.backend.strategy)  # type: ignore[attr-defined]

    for place in entry_points.places_of(stock):
        job.replace(*place, clear_session)
