"""Wrong trainings, made on purpose to test that the comparison finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from collective.comparison import PERTURBATIONS
from collective.training.step.forward import Sums
from collective.training.step.inputs import StepInputs
from collective.training.step.local_sums import MicroBatches


def apply(name: str) -> None:
    """Makes all trainings of this process wrong in a way of ``PERTURBATIONS``."""
    wrong, right = WRONG[name], MicroBatches.sums

    def perturbed(self: MicroBatches, inputs: StepInputs) -> Sums:
        share = inputs.count / inputs.global_rows
        return wrong(self, right(self, inputs), share, inputs.replica)

    MicroBatches.sums = perturbed  # type: ignore[method-assign]


def _clip_before_sum(local: MicroBatches, sums: Sums, share: Any, replica: Any) -> Sums:
    """Each replica clips its own gradient, as Keras does under tf.distribute."""
    optimizer = local.prepared.model.optimizer
    norm = optimizer.global_clipnorm or optimizer.clipnorm or 0.1
    replicas = local.backend.replicas
    clipped = [
        [
            clip / replicas
            for clip in tf.clip_by_global_norm([g * replicas for g in of], norm)[0]
        ]
        for of in sums.gradients
    ]
    return sums._replace(gradients=clipped)


def _mean_of_means(local: MicroBatches, sums: Sums, share: Any, replica: Any) -> Sums:
    """Each replica counts alike, however many rows it has."""
    replicas = local.backend.replicas
    factor = tf.math.divide_no_nan(tf.ones([], share.dtype), replicas * share)
    return _scaled(sums, factor)


def _dropped_rank(local: MicroBatches, sums: Sums, share: Any, replica: Any) -> Sums:
    """The last replica's gradients are lost."""
    kept = replica != local.backend.replicas - 1
    return _scaled(sums, tf.cast(kept, share.dtype))


def _flipped_bit(local: MicroBatches, sums: Sums, share: Any, replica: Any) -> Sums:
    """On the last replica, the sign of one number flips: the smallest tensor's largest.

    A bit of it matters most there, so that rounding in float32 hides it in no step.
    """
    last = replica == local.backend.replicas - 1
    gradients = [list(of) for of in sums.gradients]
    of = gradients[0]
    smallest = min(range(len(of)), key=lambda i: of[i].shape.num_elements())
    flat = tf.reshape(of[smallest], [-1])
    place = tf.argmax(tf.abs(flat))
    flipped = tf.tensor_scatter_nd_update(flat, [[place]], [-flat[place]])
    of[smallest] = tf.where(last, tf.reshape(flipped, of[smallest].shape), of[smallest])
    return sums._replace(gradients=gradients)


def _scaled(sums: Sums, factor: tf.Tensor) -> Sums:
    gradients = [[g * tf.cast(factor, g.dtype) for g in of] for of in sums.gradients]
    return sums._replace(gradients=gradients)


WRONG: dict[str, Callable[[MicroBatches, Sums, Any, Any], Sums]] = dict(
    zip(
        PERTURBATIONS,
        (_clip_before_sum, _mean_of_means, _dropped_rank, _flipped_bit),
        strict=True,
    )
)
