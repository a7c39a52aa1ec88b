"""Variables that the step reads and the model does not have.

A loss may read a ``keras.Variable`` of a closure (the weight of a KL term), a learning
rate may be a function of a ``tf.Variable``. Callbacks change them on rank 0; they are
broadcast with the model's.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.prepared import PreparedModel

_WRITES = (
    "AssignVariable",
    "AssignAddVariable",
    "AssignSubVariable",
    "ResourceScatter",
    "ResourceStridedSliceAssign",
)

_found: WeakKeyDictionary[keras.Model, list[tf.Variable]] = WeakKeyDictionary()


def found(model: keras.Model) -> list[tf.Variable]:
    """Those of a model that is trained, in an order that all ranks have; else none."""
    return _found.get(model, [])


def register(prepared: PreparedModel, backend: Backend, traced: Any) -> None:
    """Finds the variables of a step.

    Args:
        prepared: The model.
        backend: That the step is for.
        traced: The concrete function of the forward and backward pass.

    Raises:
        UsageError: The forward pass assigns such a variable, on several replicas.
    """
    model = prepared.model
    own = [*prepared.trainable, *prepared.state, *model.optimizer.variables]
    own += keras_compat.metric_variables(model)
    known = {id(keras_compat.tf_variable(v)) for v in own}
    rates = tf.function(
        lambda: keras_compat.learning_rates(model.optimizer), autograph=False
    )
    with backend.scope():
        read = [*traced.graph.variables, *rates.get_concrete_function().graph.variables]
    outside = list({id(v): v for v in read if id(v) not in known}.values())
    written = _writes(traced)
    if written and outside and backend.most_replicas > 1:
        names = ", ".join(repr(v.name) for v in outside)
        raise UsageError(
            f"the forward pass assigns a tf.Variable that model {model.name!r} does not "
            f"have ({names}): each of {backend.most_replicas} replicas would have its own",
            hint="make it by self.add_weight(..., trainable=False) of a layer",
        )
    _found[model] = outside


def _writes(traced: Any) -> bool:
    graph = traced.graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    return any(node.op.startswith(_WRITES) for node in nodes)
