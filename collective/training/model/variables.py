"""The variables that make two ranks the same, and those that are not simply trained.

*Outside variables* are read by the step and do not belong to the model. A loss may
read a ``keras.Variable`` of a closure (the weight of a KL term), a learning rate may be a
function of a ``tf.Variable``. Callbacks change them on rank 0; they are broadcast with the
model's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.log import log
from collective.training import keras_compat
from collective.training.keras_compat import tensorflow_names
from collective.training.keras_compat.traced import nodes_of
from collective.training.model.record import (
    record_of,
    state_variables,
    trainable_variables,
)
from collective.training.sharding.held import is_held

_WRITES = (
    "AssignVariable",
    "AssignAddVariable",
    "AssignSubVariable",
    "ResourceScatter",
    "ResourceStridedSliceAssign",
)


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Return weights, layer state and optimizer state.

    For a model with its own ``train_step``, that is the state of all optimizers it holds.
    """
    return [
        *trainable_variables(model),
        *state_variables(model),
        *optimizer_variables(model),
    ]


def optimizers_of(model: keras.Model) -> list[keras.Optimizer]:
    """Return the compiled optimizer; all optimizers if the model has its own ``train_step``."""
    if keras_compat.model.overrides(model, "train_step"):
        return [model.optimizer, *keras_compat.model.other_optimizers(model)]
    return [model.optimizer]


def optimizer_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of a model's optimizers; none if it is not compiled."""
    if getattr(model, "optimizer", None) is None:
        return []
    return [v for optimizer in optimizers_of(model) for v in optimizer.variables]


def is_in_parts(model: keras.Model) -> bool:
    """Return whether ranks have parts of variables of a model, or of its optimizers."""
    return any(is_held(variable) for variable in all_variables(model))


def replicated_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of ``all_variables`` that every rank holds whole."""
    return [v for v in all_variables(model) if not is_held(v)]


def outside_variables(model: keras.Model) -> list[tf.Variable]:
    """Return the outside variables of a model, in the same order on all ranks."""
    return record_of(model).outside


def outside_seeds(model: keras.Model) -> list[tf.Variable]:
    """Return the states of seed generators among the outside variables."""
    return [
        v for v in outside_variables(model) if keras_compat.seeds.SEED_STATE in v.name
    ]


def captured_variables(graph: tf.Graph) -> list[tf.Variable]:
    """Return the variables that a traced function uses, in the order of their first use.

    ``graph.variables`` has another order on each rank.
    """
    by_handle = {id(variable.handle): variable for variable in graph.variables}
    known = [by_handle.pop(id(outer), None) for outer, _ in graph.captures]
    found = [*(v for v in known if v is not None), *by_handle.values()]
    return [keras_compat.one_copy.container(variable) for variable in found]


def written_variables(graph: tf.Graph) -> list[tf.Variable]:
    """Return the variables that a function writes, in the order in which it met them."""
    handles = {
        handle.ref()
        for operation in graph.get_operations()
        for handle in tensorflow_names.written_handles(operation)
    }
    written = {id(outer) for outer, inner in graph.captures if inner.ref() in handles}
    return [v for v in captured_variables(graph) if id(v.handle) in written]


def register_outside_variables(
    model: keras.Model, backend: Backend, traced: Any, writes: bool = False
) -> None:
    """Find the outside variables of a step.

    Args:
        traced: The concrete function of the forward and backward pass.
        writes: Whether every rank makes the same writes to them.

    Raises:
        UsageError: The forward pass assigns such a variable, on several replicas.
    """
    own = [*trainable_variables(model), *state_variables(model)]
    own += optimizer_variables(model)
    own += keras_compat.model.metric_variables(model)
    known = {id(keras_compat.model.tf_variable(v)) for v in own}
    rates = tf.function(
        lambda: keras_compat.optimizers.learning_rates(model.optimizer), autograph=False
    )
    with backend.scope():
        graphs = traced.graph, rates.get_concrete_function().graph
        read = [v for graph in graphs for v in captured_variables(graph)]
    outside = list({id(v): v for v in read if id(v) not in known}.values())
    written = any(node.op.startswith(_WRITES) for node in nodes_of(traced.graph))
    if written and outside and backend.most_replicas > 1 and not writes:
        names = ", ".join(repr(v.name) for v in outside)
        raise UsageError(
            f"the forward pass assigns a tf.Variable that model {model.name!r} does not "
            f"have ({names}): each of {backend.most_replicas} replicas would have its own",
            hint="make it by self.add_weight(..., trainable=False) of a layer",
        )
    record_of(model).outside = outside


def dtype_of_sums(variables: Iterable[keras.Variable]) -> tf.DType:
    """Return the dtype of sums over replicas: float64 if the step trains float64 variables."""
    wide = any(variable.dtype == "float64" for variable in variables)
    return tf.float64 if wide else tf.float32


def check_frozen_layers(model: keras.Model, method: str) -> None:
    """Warn on rank 0 if a method has set ``layer.trainable``, which has no effect now.

    The step trains the variables that were trainable when it was made. Keras makes its
    train function in the first step and keeps it, so a later change has no effect there
    either. One before the first step is refused (``RankZeroCallbacks``).
    """
    before = {id(v): v.path for v in trainable_variables(model)}
    now = {id(v): v.path for v in model.trainable_variables}
    changed = [
        path for key, path in (before | now).items() if (key in before) != (key in now)
    ]
    if not changed:
        return
    what = f"a callback's {method} has made {changed[0]!r} " + (
        "trainable" if changed[0] in now.values() else "not trainable"
    )
    hint = "set layer.trainable, compile the model, and call fit again"
    if method != "on_train_begin" and record_of(model).is_new("frozen"):
        log.warning("%s; as in Keras, that changes nothing in this fit: %s", what, hint)
