"""A user's own step on the rows of one replica, and which variables it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.custom_step.building import packed
from collective.training.custom_step.replica import (
    OrderedSums,
    ReplicaHooks,
    Share,
)
from collective.training.replica.rows import Rows

Method = Callable[[Any], Any]
Logs = dict[str, tf.Tensor]


class LocalStep:
    """Calls ``train_step`` or ``test_step`` of a model on one replica's rows.

    Attributes:
        sources: For each returned name, the metric whose result it is; None for
            others. Known after the first call, as the next two.
        paths: See ``ReplicaHooks.paths``.
        state: The variables that the method writes, other than those of optimizers and
            metrics: each replica may have another value afterwards.
    """

    def __init__(
        self, model: keras.Model, method: Method, sums: OrderedSums, seed: int
    ):
        self.model = model
        self.method = method
        self.sums = sums
        self.seed = seed
        self.sources: dict[str, keras_compat.Source | None] = {}
        self.paths: list[str] = []
        self.state: list[tf.Variable] = []
        self._updated: set[int] = set()

    def trace(self, rows: Rows, share: Share) -> Callable[[Rows, Share], Logs]:
        """Traces the method inside the current graph; call the result there.

        Where a model that runs eagerly trains, nothing is traced: it has been, once.
        """
        if tf.executing_eagerly():
            return self
        traced = tf.function(self.__call__, autograph=False).get_concrete_function(
            rows, share
        )
        self.state = self._state(written_variables(traced.graph))
        return lambda rows, share: traced(rows, share)

    def __call__(self, rows: Rows, share: Share) -> Logs:
        """The method on these rows; what it returned, by name."""
        hooks = ReplicaHooks(self.sums, share, self.seed)
        with keras_compat.intercept(hooks, self.model.metrics) as results:
            logs = self.method(packed(rows))
            if not isinstance(logs, dict):
                raise UsageError(
                    f"{self.method.__name__} of model {self.model.name!r} returned "
                    f"{type(logs).__name__}, not a dict",
                    hint="return {m.name: m.result() for m in self.metrics}",
                )
        sources = {n: results.get(id(value)) for n, value in logs.items()}
        self.sources = {n: found and found[1] for n, found in sources.items()}
        self.paths, self._updated = hooks.paths, hooks.updated
        return {name: tf.convert_to_tensor(value) for name, value in logs.items()}

    def _state(self, written: list[tf.Variable]) -> list[tf.Variable]:
        equal = set(self._updated)
        equal |= {id(keras_compat.tf_variable(v)) for v in self.model.metrics_variables}
        equal.add(id(self.sums.order))
        return [v for v in written if id(v) not in equal and _is_summed(v)]


def _is_summed(variable: tf.Variable) -> bool:
    """Seeds advance alike on every replica; texts and handles have no sum."""
    is_seed = keras_compat.SEED_STATE in variable.name
    dtype = variable.dtype
    return not is_seed and (dtype.is_floating or dtype.is_integer or dtype.is_bool)


def written_variables(graph: Any) -> list[tf.Variable]:
    """The variables of others that a function writes.

    Args:
        graph: The ``FuncGraph`` of the function. Branches and loops inside are included.

    Returns:
        In the order in which the function first uses them: the same on every rank,
        unlike that of ``graph.variables``.
    """
    written = set()
    for operation in graph.get_operations():
        _, writes = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        written |= {handle.ref() for handle in writes}
    variables = {id(v.handle): v for v in graph.variables}
    handles = [id(outer) for outer, inner in graph.captures if inner.ref() in written]
    return [variables[handle] for handle in handles if handle in variables]
