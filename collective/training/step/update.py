"""From sums over all replicas to new variables: the gradients, and the plain update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.tensorflow_ops.rows import dense
from collective.training import keras_compat
from collective.training.prepared import PreparedModel
from collective.training.step import layer_state
from collective.training.step.forward import Sums
from collective.training.step.found import Found
from collective.training.step.inputs import Weights
from collective.training.traced import traced


class KerasUpdate:
    """Keras' optimizer, on whole variables; see ``Update``.

    Args:
        jit_compile: Whether XLA makes one kernel of it: a GPU takes longer to launch each
            operation on each variable than to compute it.
    """

    def __init__(
        self, prepared: PreparedModel, backend: Backend, jit_compile: bool = False
    ):
        self.optimizer = prepared.model.optimizer
        self.variables = prepared.trainable
        self.backend = backend
        self.jit_compile = jit_compile

    def check(self, found: Found) -> None:
        """Updates every variable."""

    def apply(self, gradients: Sequence[Any], indices: Sequence[int]) -> None:
        """Inside ``Backend.run``: un-scales, clips, updates, constrains, averages."""
        if self.jit_compile and all(map(tf.is_tensor, gradients)):
            compiled = traced(lambda *g: self._apply(g, indices), jit_compile=True)
            compiled(*gradients)
        else:
            self._apply(gradients, indices)

    def _apply(self, gradients: Sequence[Any], indices: Sequence[int]) -> None:
        keras_compat.apply(
            self.optimizer,
            gradients,
            [self.variables[i] for i in indices],
            self.backend.assign,
            self.variables,
        )

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        with self.backend.scope():
            keras_compat.finish(self.optimizer, self.variables)


def global_gradients(
    sums: Sums, found: Found, prepared: PreparedModel
) -> tuple[list[Any], list[int]]:
    """Gradients of the global loss, of sums over replicas; their variables by index."""
    # A maximum over pieces of the batch: of one piece, and of all its rows.
    overwrites = [
        tf.cast(tf.reduce_max(pieces, axis=0), tf.float32) for pieces in sums.overwrites
    ]
    gradients = [
        *divided(sums, found, prepared),
        *_look_ups(sums.weights, found, prepared),
        *overwrites,
    ]
    return gradients, [*found.connected, *found.look_ups, *found.overwritten]


def divided(sums: Sums, found: Found, prepared: PreparedModel) -> list[tf.Tensor]:
    """The gradients of connected variables: each part of the loss over its weight."""
    divisors = [None, *sums.weights] if found.has_divided else sums.weights
    gradients = []
    for i, terms in zip(
        found.connected, zip(*sums.gradients, strict=True), strict=True
    ):
        quotients = [_quotient(*pair) for pair in zip(terms, divisors, strict=True)]
        gradients.append(tf.cast(tf.add_n(quotients), prepared.trainable[i].dtype))
    return gradients


def _look_ups(
    weights: list[tf.Tensor], found: Found, prepared: PreparedModel
) -> list[Any]:
    """Those of look-ups; added up where they travelled as rows only to save bytes."""
    gradients = []
    for i, (slices, total, added) in found.look_ups.items():
        values = _quotient(slices.values, [None, *weights][total])
        values = tf.cast(values, prepared.trainable[i].dtype)
        slices = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
        gradients.append(dense(slices) if added else slices)
    return gradients


def _quotient(total: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
    """A total over its weight; None where it has been divided already."""
    if weight is None:
        return total
    return tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))


def assign_state(
    totals: list[tf.Tensor],
    found: Found,
    prepared: PreparedModel,
    weights: Weights,
    backend: Backend,
) -> None:
    """Writes what layers have assigned; see ``collective.training.step.layer_state``.

    Args:
        totals: ``Sums.state`` over all replicas.
        weights: The values before the step.
    """
    old = [weights.state[i] for i in found.changing]
    old += [weights.trainable[i] for i in found.assigned]
    variables = [prepared.state[i] for i in found.changing]
    variables += [prepared.trainable[i] for i in found.assigned]
    backend.assign(
        [keras_compat.tf_variable(v) for v in variables],
        list(map(layer_state.updated, old, totals)),
    )
