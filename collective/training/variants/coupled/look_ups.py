"""The gradient of each look-up in an embedding, from all replicas.

Most optimizers add up the squares of what they get, which no sum over replicas has
(``collective.training.step.look_ups``). So the slices of all replicas are gathered here.
table, and added up then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.log import log
from collective.tensorflow_ops.xla import not_compiled
from collective.training import compatibility, keras_compat
from collective.training.prepared import PreparedModel
from collective.training.step import look_ups
from collective.training.step.found import LookUps
from collective.training.step.plan import StepPlan
from collective.training.variants.coupled.gather import carrier_of
from collective.training.variants.coupled.replica import ReplicaContext

CHOICES = ("auto", "combined", "keras")
_INDEX_BYTES = 8
# A step with a gather takes a second longer to trace: not for less than this a step.
_LEAST_SAVED = 1 << 20
# Operations whose indices are distinct.
_ADDED_UP = ("Unique", "SparseSegment")


def planned(
    plan: StepPlan,
    choice: str,
    prepared: PreparedModel,
    backend: Backend,
    global_rows: int | None,
    features: Collection[str] = (),
) -> StepPlan:
    """The plan, with how the gradients of look-ups travel.

    Args:
        global_rows: Rows of a batch; None where it is not known.
        features: Of the training, by their names in the table of compatibility.
    """
    if choice not in CHOICES:
        raise UsageError(
            f"embedding_gradients={choice!r} is unknown",
            hint=f"one of: {', '.join(CHOICES)}",
        )
    model = prepared.model
    # Also a table of the user's own, read by ``ops.take``: the check has seen it.
    has_tables = bool(plan.look_ups) or any(
        isinstance(layer, keras.layers.Embedding) for layer in model._flatten_layers()
    )
    possible = compatibility.works({"look_ups", *features}, backend)
    wanted = choice == "keras" or (choice == "auto" and possible)
    # An own step may have other tables and optimizers: it gathers what look-ups it sees.
    if wanted and ("own_step" in features or _matters(model, has_tables)):
        compatibility.check({"look_ups", *features}, backend)
        return dataclasses.replace(plan, gather_look_ups=True)
    if backend.most_replicas == 1 or global_rows is None or not possible:
        return plan
    as_rows = travelling_as_rows(prepared, plan, global_rows)
    if as_rows and backend.rank == 0:
        paths = ", ".join(repr(prepared.trainable[place].path) for place in as_rows)
        log.info(
            f"gradients of {paths} travel as the rows that a batch looks up: fewer bytes"
        )
    return dataclasses.replace(plan, as_rows=as_rows)


def _matters(model: keras.Model, has_tables: bool) -> bool:
    """Whether an optimizer sees single look-ups where there are any."""
    singles = keras_compat.single_optimizers(model.optimizer)
    return has_tables and any(map(look_ups.sees_each, singles))


def travelling_as_rows(
    prepared: PreparedModel, plan: StepPlan, global_rows: int
) -> tuple[int, ...]:
    """Which gradients have fewer bytes as look-ups of the global batch than as a table.

    Indices of trainable variables; every rank has the same, which follow from the plan.
    """
    found = []
    for place, of_row in plan.look_ups:
        variable = prepared.trainable[place]
        rows, width = int(variable.shape[0]), math.prod(variable.shape[1:])
        size = 8 if variable.dtype == "float64" else 4
        as_rows = global_rows * of_row * (width * size + _INDEX_BYTES)
        if rows * width * size - as_rows >= _LEAST_SAVED:
            found.append(place)
    return tuple(found)


def take(
    gradients: list[list[Any]], context: ReplicaContext, plan: StepPlan
) -> dict[int, LookUps]:
    """Gathers the gradients of look-ups, and takes them out of the lists; see ``own``."""
    return gathered(own(gradients, plan), context)


def own(gradients: list[list[Any]], plan: StepPlan) -> dict[int, LookUps]:
    """Takes the gradients of this replica's look-ups out of the lists.

    A variable that several totals depend on, or whose look-ups do not follow the batch, is
    left: its look-ups are added up. So is one of distinct rows, if the optimizer is to see
    each look-up.

    Args:
        gradients: One list for each total of the loss, with an entry for each variable.
        plan: Says which.

    Returns:
        By the index of the variable.
    """
    every = plan.gather_look_ups
    found: dict[int, LookUps] = {}
    for place, of_one in enumerate(zip(*gradients, strict=True)):
        totals = [n for n, gradient in enumerate(of_one) if gradient is not None]
        if len(totals) != 1 or not (every or place in plan.as_rows):
            continue
        slices = of_one[totals[0]]
        if not isinstance(slices, tf.IndexedSlices) or not follows_batch(slices):
            continue
        if every and are_distinct(slices):
            continue
        found[place] = LookUps(slices, totals[0], not every)
        gradients[totals[0]][place] = None
    return found


def gathered(
    look_ups: Mapping[int, LookUps], context: ReplicaContext
) -> dict[int, LookUps]:
    """Those of all replicas, from this replica's."""
    slices = [
        tf.IndexedSlices(context.own(each.slices.values), *slices_of(each.slices))
        for each in look_ups.values()
    ]
    number, replicas = context.number, context.replicas
    wholes = gather_look_ups(slices, number, replicas, context.all_reduce)
    return {
        place: each._replace(slices=whole)
        for (place, each), whole in zip(look_ups.items(), wholes, strict=True)
    }


@not_compiled()
def gather_look_ups(
    look_ups: Sequence[tf.IndexedSlices],
    replica: tf.Tensor,
    replicas: int,
    sums: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
) -> list[tf.IndexedSlices]:
    """The look-ups of all replicas in several tables, in the order of the replicas.

    A replica has as many as its rows ask for, which a mask or a sparse input decides: so
    their numbers are gathered first.

    Args:
        look_ups: Of this replica, one for each table.
        replica: int64 scalar, its number.
        sums: Sums tensors of one dtype over replicas.
    """
    if not look_ups or replicas == 1:
        return list(look_ups)
    own = tf.stack([tf.shape(slices.values, tf.int64)[0] for slices in look_ups])
    (counts,) = sums([tf.one_hot(replica, replicas, dtype=tf.int64)[:, None] * own])
    before = tf.cumsum(counts, exclusive=True)[replica]
    after = tf.reduce_sum(counts, axis=0) - before - own

    def gathered(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Each is put in its place among zeros, and summed with others of its dtype."""
        carried = [tf.cast(t, carrier_of(t.dtype)) for t in tensors]
        found = list(tensors)
        for dtype in dict.fromkeys(t.dtype for t in carried):
            places = [i for i, t in enumerate(carried) if t.dtype == dtype]
            padded = [
                tf.pad(
                    carried[i],
                    [[before[i], after[i]], *[[0, 0]] * (carried[i].shape.rank - 1)],
                )
                for i in places
            ]
            for i, whole in zip(places, sums(padded), strict=True):
                found[i] = tf.cast(whole, tensors[i].dtype)
                found[i].set_shape([None, *tensors[i].shape[1:]])
        return found

    values = gathered([slices.values for slices in look_ups])
    indices = gathered([slices.indices for slices in look_ups])
    return [
        tf.IndexedSlices(value, index, slices.dense_shape)
        for value, index, slices in zip(values, indices, look_ups, strict=True)
    ]


def follows_batch(slices: tf.IndexedSlices) -> bool:
    """Whether a traced step has more look-ups for more rows: not those of positions."""
    return slices.values.shape[0] is None


def are_distinct(slices: tf.IndexedSlices) -> bool:
    """Whether a traced step has added up the look-ups of a batch by rows of the table.

    As ``tf.nn.embedding_lookup_sparse`` and Keras' product with a sparse tensor do: one
    process has one gradient for each row of the table then.
    """
    op = slices.indices.op
    while op.type in ("Cast", "Identity", "Reshape"):
        op = op.inputs[0].op
    return bool(op.type.startswith(_ADDED_UP))


def slices_of(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Which rows of which shape: all but the values."""
    return slices.indices, slices.dense_shape
