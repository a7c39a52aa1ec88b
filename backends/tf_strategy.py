"""The parts that all backends made of a ``tf.distribute.Strategy`` share."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from collective.backends.base import Availability, Backend, CoreOptions
from collective.backends.devices import configure, gpus
from collective.backends.hints import python
from collective.environment import Environment
from collective.errors import UsageError


class StrategyBackend(Backend):
    """Runs the step under ``strategy.run``. Subclasses make the strategy."""

    strategy: Any

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The strategy's scope: variables made in it have a copy on each device."""
        return self.strategy.scope()

    def run(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Runs the step on each local replica; the first one's result."""
        result = self.strategy.run(step, args=tuple(args))
        return self.strategy.experimental_local_results(result)[0]

    def replica(self) -> Any:
        """This replica's number, from TensorFlow's replica context."""
        import tensorflow as tf

        return tf.distribute.get_replica_context().replica_id_in_sync_group

    def _all_reduce(self, tensors: list[Any]) -> list[Any]:
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        return list(context.all_reduce(tf.distribute.ReduceOp.SUM, tensors))

    def assign(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Writes each replica's value to its own copy; all values are the same.

        A plain ``assign`` would apply the variable's own aggregation (a mean, an
        error) to values that need none.
        """
        import tensorflow as tf

        if not variables:
            return

        def write(strategy: Any, values: list[Any]) -> None:
            for variable, value in zip(variables, values, strict=True):
                strategy.extended.update(
                    variable, lambda v, x: v.assign(x), args=(value,), group=False
                )

        tf.distribute.get_replica_context().merge_call(write, args=(list(values),))


class LocalStrategyBackend(StrategyBackend):
    """A strategy of one process over its own devices. Subclasses make it."""

    def __init__(self, options: CoreOptions, environment: Environment | None = None):
        super().__init__(options, environment)
        if self.size > 1:
            raise UsageError(
                f"backend {self.name!r} is one process, but {self.size} processes were "
                "started",
                hint=f"another backend, or one process: {python()}",
            )
        configure(options, Environment())
        self.strategy = self._strategy()
        self.replicas = self.strategy.num_replicas_in_sync
        self.local_replicas = range(self.replicas)

    @abstractmethod
    def _strategy(self) -> Any:
        """The strategy, over devices that TensorFlow has not touched yet."""

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Usable in a process started alone."""
        if environment.size > 1:
            return Availability(
                False,
                f"{environment.size} processes were started",
                python(),
            )
        return Availability(True, cls._found())

    @classmethod
    def _found(cls) -> str:
        return f"{gpus()} GPUs" if gpus() else "logical CPU devices"
