"""The gradient of each look-up in an embedding, from all replicas.

A batch may look up one row of a table several times. Keras gives the optimizer the
gradient of each look-up by itself (``tf.IndexedSlices`` with repeated indices), and Adam,
RMSprop and others then add up their *squares*, which no sum over replicas has. So the
slices of all replicas are gathered here. SGD gives the same either way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.coupled.gather import gather_rows
from collective.training.coupled.replica import ReplicaContext

CHOICES = ("combined", "keras")


class LookUps(NamedTuple):
    """The gradients of one variable's look-ups in the global batch.

    Attributes:
        slices: Of all replicas.
        total: Number of the loss total that they are of: 0 for the divided part.
    """

    slices: tf.IndexedSlices
    total: int


def wants_look_ups(choice: str, model: keras.Model) -> bool:
    """Whether the gradients of look-ups are to be gathered.

    Args:
        choice: ``combined`` or ``keras``.
        model: Only one with an embedding and an optimizer that is not plain SGD has a
            difference.

    Raises:
        UsageError: There is no such choice.
    """
    if choice not in CHOICES:
        raise UsageError(
            f"embedding_gradients={choice!r} is unknown",
            hint=f"one of: {', '.join(CHOICES)}",
        )
    layers = model._flatten_layers()
    if choice == "combined" or not any(
        isinstance(layer, keras.layers.Embedding) for layer in layers
    ):
        return False
    singles = keras_compat.single_optimizers(model.optimizer)
    return not all(isinstance(single, keras.optimizers.SGD) for single in singles)


def take(gradients: list[list[Any]], context: ReplicaContext) -> dict[int, LookUps]:
    """Gathers the gradients of look-ups, and takes them out of the lists.

    A variable that several totals depend on, or whose look-ups do not depend on the rows
    (positions in a sequence), is left: its look-ups are added up.

    Args:
        gradients: One list for each total of the loss, with an entry for each variable.
        context: The replica.

    Returns:
        By the place of the variable.
    """
    found: dict[int, LookUps] = {}
    for place, of_one in enumerate(zip(*gradients, strict=True)):
        totals = [n for n, gradient in enumerate(of_one) if gradient is not None]
        if len(totals) != 1:
            continue
        slices = of_one[totals[0]]
        if not isinstance(slices, tf.IndexedSlices) or slices.values.shape[0]:
            continue
        found[place] = LookUps(_gathered(slices, context), totals[0])
        gradients[totals[0]][place] = None
    return found


def _gathered(slices: tf.IndexedSlices, context: ReplicaContext) -> tf.IndexedSlices:
    rows = tf.maximum(context.rows, 1) if context.maybe_empty else context.rows
    shape = slices.values.shape[1:]
    by_row = (
        tf.reshape(slices.values, [rows, -1, *shape]),
        tf.reshape(slices.indices, [rows, -1]),
    )
    values, indices = gather_rows(by_row, context)
    return tf.IndexedSlices(
        tf.reshape(values, [-1, *shape]),
        tf.reshape(indices, [-1]),
        slices.dense_shape,
    )
