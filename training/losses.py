"""A model's loss over some rows, as sums that add up over replicas.

A mean cannot be added to another mean; a sum and its weight can. Each Keras loss is
therefore taken apart at its last step, the reduction:

* where the weight is the number of rows, the input plan knows it for the whole global
  batch beforehand, so the sum is divided at once (*planned*);
* where the data decide the weight (a mask, ``mean_with_sample_weight``), sum and
  weight travel separately and are divided after the all-reduce (*weighed*).

Terms from ``add_loss``, regularisers, and the value of a user's own ``compute_loss``
are taken as means over the rows: each replica contributes by its share of the rows.
That is exact for what does not depend on the batch and for means over it; a term that
*sums* over the batch would come out smaller on more replicas (docs/reference/sharp-bits.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from collective.training import keras_compat


@dataclass(frozen=True)
class LossSums:
    """The loss of some rows, as contributions to the global batch's loss.

    Attributes:
        planned: Scalar; add over replicas and it is the planned part of the loss.
        weighed: Scalars ``(sum, weight)``, one pair for each loss whose weight the
            data decide; added over replicas, sum / weight is that part of the loss.
        outputs: Scalars ``(sum, weight)`` of the single losses of a model with
            several, without loss weights; weight is None for a planned one.
    """

    planned: tf.Tensor
    weighed: list[tuple[tf.Tensor, tf.Tensor]]
    outputs: list[tuple[tf.Tensor, tf.Tensor | None]]


def loss_sums(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    added: list[tf.Tensor],
    rows: tf.Tensor,
    global_rows: tf.Tensor,
) -> LossSums:
    """Takes the compiled loss of a batch apart.

    Args:
        model: A compiled model.
        x, y, y_pred, sample_weight: The rows of this replica and the predictions.
        added: Values of ``add_loss`` and regularisers from the forward pass.
        rows: Scalar, the number of these rows.
        global_rows: Scalar, the number of rows of the global batch.

    Returns:
        The sums. Differentiable.
    """
    dtype = tf.as_dtype(keras.config.floatx())
    planned_total = tf.zeros([], dtype)
    share = tf.cast(rows, dtype) / tf.cast(global_rows, dtype)
    if keras_compat.overrides(model, "compute_loss"):
        value = keras_compat.own_loss(model, x, y, y_pred, sample_weight, added)
        return LossSums(tf.cast(value, dtype) * share, [], [])

    parts: list[tuple[tf.Tensor, tf.Tensor | None]] = []

    def record(values: Any, weight: Any, mask: Any, reduction: str) -> tf.Tensor:
        part = _sum_and_weight(values, weight, mask, reduction, share, global_rows)
        parts.append(part)
        return part[0] if part[1] is None else tf.zeros_like(part[0])

    with keras_compat.reduced_by(record):
        planned = keras_compat.compiled_loss(model, y, y_pred, sample_weight)
    if planned is not None:
        planned_total += tf.cast(planned, dtype)
    for value in added:
        planned_total += tf.reduce_sum(tf.cast(value, dtype)) * share

    weighed = []
    for index, (_, weight) in enumerate(parts):
        if weight is None:
            continue
        # Once more with only this loss, so that Keras applies its loss weight.
        with keras_compat.reduced_by(_only(index, parts)):
            total = keras_compat.compiled_loss(model, y, y_pred, sample_weight)
        weighed.append((tf.cast(total, dtype), tf.cast(weight, dtype)))
    outputs = parts if keras_compat.loss_trackers(model) else []
    return LossSums(planned_total, weighed, outputs)


def _only(
    wanted: int, parts: list[tuple[tf.Tensor, tf.Tensor | None]]
) -> keras_compat.Reduce:
    """A reduction that lets the loss number ``wanted`` through and no other."""
    calls = iter(range(len(parts)))

    def reduce(*_: Any) -> tf.Tensor:
        index = next(calls)
        value = parts[index][0]
        return value if index == wanted else tf.zeros_like(value)

    return reduce


def _sum_and_weight(
    values: tf.Tensor,
    weight: Any,
    mask: Any,
    reduction: str,
    share: tf.Tensor,
    global_rows: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """One loss' sum and weight, both divided by the number of global rows.

    That common factor cancels where both travel; it keeps gradients in float16 as
    large as Keras would have them.
    """
    dtype = values.dtype
    if values.shape.rank == 0:  # a user's function that took the mean itself
        return values * tf.cast(share, dtype), None
    count = tf.cast(global_rows, dtype)
    if mask is not None:
        mask = tf.cast(mask, dtype)
        if weight is None:
            weight = mask
        else:
            aligned, weight = keras_compat.same_rank(mask, tf.cast(weight, dtype))
            weight = weight * aligned
    if weight is not None:
        values, weight = keras_compat.same_rank(values, tf.cast(weight, dtype))
        values = values * weight
    total = tf.reduce_sum(values)
    if reduction == "mean_with_sample_weight" and weight is not None:
        return total / count, tf.reduce_sum(weight) / count
    if reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight"):
        if mask is not None:
            return total / count, tf.reduce_sum(mask) / count
        per_row = tf.cast(tf.reduce_prod(tf.shape(values)[1:]), dtype)
        return total / (per_row * count), None
    return total, None
