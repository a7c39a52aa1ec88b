"""What the backends made of a ``tf.distribute.Strategy`` have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from backends.base import Backend


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
