"""Wrong trainings, made on purpose to test that the comparison finds them.

``--model tests.comparison.perturbation:model`` is wrong under the backend, and in the way,
that ``PERTURBED=BACKEND:WHAT`` names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from collective.training import models
from collective.training.partition.exchange import (
    NONE,
    BackendExchange,
    Gradients,
    Values,
    combined,
)
from collective.training.partition.method import PartitionedMethod

Tensors = list[tf.Tensor]


def model(input_shape: Any, classes: int) -> keras.Model:
    """The built-in MLP, trained wrongly under one backend."""
    backend, _, what = os.environ["PERTURBED"].partition(":")
    if sys.argv[sys.argv.index("--backend") + 1] == backend:
        apply(what)
    return models.build("mlp", input_shape=input_shape, classes=classes)


def apply(name: str) -> None:
    """Makes all trainings of this process wrong in a way of ``WRONG``.

    What is changed are the tensors that a replica sends: floating, and no scalars, which
    are losses and counts.
    """
    wrong = WRONG[name]
    reduce, cut = BackendExchange.reduce, PartitionedMethod._cut
    shares: list[tf.Tensor] = []

    def noting(self: Any, own: Any, total: Any, replica: Any, exchange: Any) -> Any:
        shares.append(tf.cast(own.count, tf.float64) / tf.cast(total, tf.float64))
        return cut(self, own, total, replica, exchange)

    def perturbed(
        self: BackendExchange,
        kind: str,
        values: Values,
        gradients: Gradients = NONE,
        scattered: Values = (),
    ) -> list[tf.Tensor]:
        sent = list(values)
        places = [
            i
            for i, parts in enumerate(sent)
            if parts[0].dtype.is_floating and parts[0].shape.rank != 0
        ]
        if kind == "sum" and places:
            mine = [combined(kind, sent[i]) for i in places]
            changed = wrong(mine, shares[-1], self._backend)
            for i, tensor in zip(places, changed, strict=True):
                sent[i] = [tensor]
        return reduce(self, kind, sent, gradients, scattered)

    BackendExchange.reduce = perturbed  # type: ignore[method-assign]
    PartitionedMethod._cut = noting  # type: ignore[method-assign]


def _clip_before_sum(gradients: Tensors, share: tf.Tensor, backend: Any) -> Tensors:
    """Each replica clips its own gradient, as Keras does under tf.distribute."""
    replicas = backend.replicas
    scaled = [g * replicas for g in gradients]
    return [g / replicas for g in tf.clip_by_global_norm(scaled, 0.1)[0]]


def _mean_of_means(gradients: Tensors, share: tf.Tensor, backend: Any) -> Tensors:
    """Each replica counts alike, however many rows it has."""
    factor = tf.math.divide_no_nan(tf.ones([], share.dtype), backend.replicas * share)
    return [g * tf.cast(factor, g.dtype) for g in gradients]


def _dropped_rank(gradients: Tensors, share: tf.Tensor, backend: Any) -> Tensors:
    """The last replica's gradients are lost."""
    kept = tf.not_equal(backend.replica(), backend.replicas - 1)
    return [g * tf.cast(kept, g.dtype) for g in gradients]


def _flipped_bit(gradients: Tensors, share: tf.Tensor, backend: Any) -> Tensors:
    """On the last replica, the sign of one number flips: the smallest tensor's largest.

    A bit of it matters most there, so that rounding in float32 hides it in no step.
    """
    last = tf.equal(backend.replica(), backend.replicas - 1)
    sizes = [g.shape.num_elements() or 1 << 62 for g in gradients]
    smallest = sizes.index(min(sizes))
    whole = gradients[smallest]
    flat = tf.reshape(whole, [-1])
    place = tf.argmax(tf.abs(flat))
    flipped = tf.tensor_scatter_nd_update(flat, [[place]], [-flat[place]])
    changed = tf.where(last, tf.reshape(flipped, tf.shape(whole)), whole)
    return [changed if i == smallest else g for i, g in enumerate(gradients)]


WRONG: dict[str, Callable[[Tensors, tf.Tensor, Any], Tensors]] = {
    "clip-before-sum": _clip_before_sum,
    "mean-of-means": _mean_of_means,
    "dropped-rank": _dropped_rank,
    "flipped-bit": _flipped_bit,
}
