"""``collective.fit`` of a model that was made in a strategy's scope.

The step of ``collective.fit`` sums by the backend itself; here it runs inside the
strategy, so that it finds the model's variables on each device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import LocalDevices
from collective.backends.tf_strategy import StrategyBackend
from collective.distribute.cross_device_ops import SUM
from collective.errors import UsageError


class _InStrategy(LocalDevices):
    """Methods of a backend whose steps run as the one replica of this process."""

    scope = StrategyBackend.scope
    run = StrategyBackend.run
    assign = StrategyBackend.assign

    @contextlib.contextmanager
    def only_rank_zero(self, what: str) -> Iterator[None]:
        """Read variables without the other ranks: the step has made them equal."""
        inner = self.strategy.extended.backend
        reading = self.strategy.extended.reading_locally()
        with super().only_rank_zero(what), inner.only_rank_zero(what), reading:
            yield


class _OnDevices(_InStrategy):
    """Methods of a backend with a replica on each of several devices of a process."""

    def replica(self) -> int | tf.Tensor:
        """Return the number as ``StrategyBackend`` or ``LocalDevices`` does."""
        if self._current is not None:
            return self._current
        return StrategyBackend.replica(self)  # type: ignore[arg-type]

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], rounded: Sequence[int] = ()
    ) -> list[tf.Tensor]:
        """Sum over the devices by TensorFlow, then over the processes."""
        self.require_all_ranks()
        context = tf.distribute.get_replica_context()
        return list(context.all_reduce(SUM, [tf.identity(t) for t in tensors]))

    def sum_devices(
        self, columns: Sequence[Sequence[tf.Tensor]]
    ) -> list[list[tf.Tensor]]:
        """Sum over the devices alone; the strategy would include all processes."""
        return [[tf.add_n(parts)] for parts in zip(*columns, strict=True)]

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "this option needs one replica in each process, and the strategy has "
            f"{len(self.local_replicas)}",
            hint="Strategy(devices=1), and more processes",
        )

    reduce_scatter = all_gather = all_to_all = _refuse


def backend_of(strategy: tf.distribute.Strategy) -> Backend:
    """Return the backend by which ``collective.fit`` trains a strategy's models."""
    extended = strategy.extended
    backend, devices = extended.backend, len(extended.worker_devices)
    several = devices > 1
    methods = _OnDevices if several else _InStrategy
    kind = type(backend)
    made = type(kind.__name__, (methods, kind), {"__doc__": kind.__doc__})
    found: Any = object.__new__(made)
    found.__dict__.update(vars(backend))
    found.strategy = strategy
    found.devices = extended.worker_devices
    found.between = backend if backend.replicas > 1 else None
    if several:
        found.replicas = backend.size * devices
        found.local_replicas = range(
            backend.rank * devices, (backend.rank + 1) * devices
        )
        found.overlaps = False
    return found
