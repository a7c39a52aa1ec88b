"""Layers that couple the rows of a batch, computed on the rows of all replicas.

A balance term of a mixture of experts, a graph over the batch, centres of classes: each
replica gathers the layer's inputs, calls the layer on the whole global batch as one
process would, and goes on with its own rows of the output. The value of ``add_loss``, and
what the layer assigns, are those of the whole batch on every replica, whose shares of the
rows add up to one. In the backward pass the gradients of the gathered inputs are summed
over replicas: row i owes something to the outputs of all rows.

It costs two all-reduces of the layer's inputs, and the layer's work on every replica.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.step.plan import StepPlan
from collective.training.variants.coupled.gather import gather_rows
from collective.training.variants.coupled.replica import ReplicaContext

_DRAWS = re.compile(r"^(Stateless(Random|Trunc|Parameterized|Multi|Shuffle)|Random)")


@contextlib.contextmanager
def computed(model: keras.Model, plan: StepPlan, context: ReplicaContext) -> Any:
    """Inside, the layers of the plan are called on the rows of all replicas."""
    if not plan.whole_layers or context.replicas == 1:
        yield
        return
    layers = list(model._flatten_layers())
    chosen = [layers[place] for place in plan.whole_layers]
    context.whole_layers = frozenset(map(id, chosen))

    def one(layer: keras.Layer, call: Any, args: Any, kwargs: Any) -> Any:
        with _no_draws(layer):
            return _call(call, args, kwargs, context)

    with keras_compat.around_layer_calls(chosen, one):
        yield


def _call(call: Any, args: Any, kwargs: Any, context: ReplicaContext) -> Any:
    """Calls a layer on all rows; returns this replica's rows of the outputs."""
    leaves = tf.nest.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if _has_rows(leaf)]
    gathered = gather_rows([leaves[i] for i in places], context, uses_of_all=True)
    for place, whole in zip(places, gathered, strict=True):
        leaves[place] = whole
    args, kwargs = tf.nest.pack_sequence_as((args, kwargs), leaves)
    rows = tf.maximum(context.rows, 1)  # one, where there is none
    first = tf.minimum(context.first_row, context.global_rows - rows)

    def own(tensor: Any) -> Any:
        if not _has_rows(tensor):
            return tensor
        return keras_compat.cut_tensor(tensor, first, first + rows)

    return tf.nest.map_structure(own, call(*args, **kwargs))


def _has_rows(leaf: Any) -> bool:
    """Whether the first axis is that of the batch, which is open in a traced step."""
    return (
        isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank) and leaf.shape[0] is None
    )


@contextlib.contextmanager
def _no_draws(layer: keras.Layer) -> Any:
    """Refuses random numbers: a rank would draw those of its own rows."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    drawn = [op for op in graph.get_operations()[before:] if _DRAWS.match(op.type)]
    if drawn:
        raise UsageError(
            f"layer {layer.name!r} couples the rows of a batch and draws random numbers "
            f"({drawn[0].type}): it cannot be computed on the rows of all replicas",
            hint="whole_batch=True (--set whole_batch=True): rank 0 computes whole "
            "batches alone; or draw in a layer of its own",
        )
