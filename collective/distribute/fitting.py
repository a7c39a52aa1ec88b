"""``collective.fit`` of a model that was made in a strategy's scope.

The step of ``collective.fit`` sums by the backend itself; here it runs inside of the
strategy, so that it finds the model's variables on each device.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.tf_strategy import StrategyBackend
from collective.distribute.exchange import SUM
from collective.errors import UsageError


class _InStrategy(Backend):
    """Methods of a backend whose steps run as the one replica of this process."""

    strategy: Any

    scope = StrategyBackend.scope
    run = StrategyBackend.run
    assign = StrategyBackend.assign

    @contextlib.contextmanager
    def only_rank_zero(self, what: str) -> Iterator[None]:
        """Variables are read without the other ranks: the step has made them the same."""
        inner = self.strategy.extended.backend
        reading = self.strategy.extended.reading_locally()
        with super().only_rank_zero(what), inner.only_rank_zero(what), reading:
            yield


class _OnDevices(_InStrategy):
    """Methods of a backend with a replica on each of several devices of a process."""

    replica = StrategyBackend.replica

    def all_reduce(
        self, tensors: Sequence[Any], rounded: Sequence[int] = ()
    ) -> list[Any]:
        """Over the devices by TensorFlow, then over the processes."""
        self.require_all_ranks()
        context = tf.distribute.get_replica_context()
        return list(context.all_reduce(SUM, [tf.identity(t) for t in tensors]))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "what was asked for needs one replica in each process, and the strategy has "
            f"{len(self.local_replicas)}",
            hint="Strategy(devices=1), and more processes",
        )

    reduce_scatter = all_gather = all_to_all = _refuse


def backend_of(strategy: Any) -> Backend:
    """The backend by which ``collective.fit`` trains models of a strategy's scope."""
    extended = strategy.extended
    backend, devices = extended.backend, len(extended.worker_devices)
    several = devices > 1
    methods = _OnDevices if several else _InStrategy
    kind = type(backend)
    found = copy.copy(backend)
    found.__class__ = type(kind.__name__, (methods, kind), {"__doc__": kind.__doc__})
    found.strategy = strategy
    if several:
        found.replicas = backend.size * devices
        found.local_replicas = range(
            backend.rank * devices, (backend.rank + 1) * devices
        )
        found.overlaps = False
    return found


def for_model(model: Any, backend: str | Backend) -> str | Backend:
    """The backend that trains a model: that of the strategy in whose scope it was made."""
    if isinstance(model, keras.Model):
        strategy = getattr(model, "distribute_strategy", None)
        return getattr(strategy, "fit_backend", None) or backend
    return backend


def route(strategy: Any) -> None:
    """Has Keras' ``fit``, ``evaluate`` and ``predict`` of such models be ours."""
    _route_calls(strategy.extended.backend)


_routed: list[Any] = []


def _route_calls(backend: Backend) -> None:
    # The calls are on the highest floor of this package's room.
    from collective.training.unedited.calls import replace_calls
    from collective.training.unedited.distribute import is_distributed
    from collective.training.unedited.job import Job

    if _routed or is_distributed():
        return
    job = Job(backend)
    replace_calls(job, {}, own_model)
    _routed.append(job)


def own_model(model: keras.Model) -> bool:
    """Whether a model was made in the scope of one of our strategies."""
    return for_model(model, "") != ""


Routed = Callable[[keras.Model], bool]
