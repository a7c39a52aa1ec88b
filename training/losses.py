"""A model's loss over some rows, as sums that can be added over replicas.

Row i of the global batch has loss l_i and weight w_i. Replica r holds the rows B_r. The
loss of the global batch is

    L  =  sum_i w_i l_i / sum_i w_i  =  sum_r S_r / sum_r W_r,

    S_r = sum_{i in B_r} w_i l_i,    W_r = sum_{i in B_r} w_i.

Replicas therefore send S_r and W_r and divide once, after the all-reduce. The mean of
their means, (1/R) sum_r S_r / W_r, is another number as soon as the W_r differ: a last
batch that is shorter, sample weights, masks. W_r does not depend on the model's weights,
so gradients obey the same rule: grad L = sum_r grad S_r / sum_r W_r.

Keras' losses end in a mean. Here each loss is taken apart at that last step:

* *divided*: where the total weight is the number of rows, it is known before the step
  for the whole global batch, and S_r is divided at once;
* *undivided*: where the data decide the weight (a mask, ``mean_with_sample_weight``),
  S_r and W_r travel separately and are divided after the all-reduce.

Terms from ``add_loss``, regularizers, and the value of a user's own ``compute_loss`` are
means over the rows as far as we know: each replica contributes them times its share of
the rows. That is exact for a term that does not depend on the batch and for a mean over
it; a term that *sums* over the batch becomes smaller on more replicas
(docs/reference/sharp-bits.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective.training import keras_compat


class SumAndWeight(NamedTuple):
    """The sum of one loss over some rows. Scalars.

    Attributes:
        total: S_r; divided already where ``weight`` is None.
        weight: W_r.
    """

    total: tf.Tensor
    weight: tf.Tensor | None


@dataclass(frozen=True)
class LossSums:
    """The loss of some rows, as contributions to the global batch's loss.

    Attributes:
        divided: Scalar; its sum over replicas is the divided part of the loss.
        undivided: One ``(total, weight)`` for each undivided loss; with both summed
            over replicas, total / weight is that part of the loss.
        outputs: The losses of the single outputs of a model with several, without loss
            weights.
    """

    divided: tf.Tensor
    undivided: list[tuple[tf.Tensor, tf.Tensor]]
    outputs: list[SumAndWeight]

    @property
    def totals(self) -> list[tf.Tensor]:
        """The divided part, then each undivided total: what has a gradient."""
        return [self.divided, *(total for total, _ in self.undivided)]


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
        added: Values of ``add_loss`` and regularizers from the forward pass.
        rows: Scalar, the number of these rows.
        global_rows: Scalar, the number of rows of the global batch.

    Returns:
        The sums. Differentiable.
    """
    dtype = tf.as_dtype(keras.config.floatx())
    share = tf.cast(rows, dtype) / tf.cast(global_rows, dtype)
    if keras_compat.overrides(model, "compute_loss"):
        value = keras_compat.custom_loss(model, x, y, y_pred, sample_weight, added)
        return LossSums(tf.cast(value, dtype) * share, [], [])

    losses: list[SumAndWeight] = []

    def record(values: Any, weight: Any, mask: Any, reduction: str) -> tf.Tensor:
        loss = _sum_and_weight(values, weight, mask, reduction, share, global_rows)
        losses.append(loss)
        return loss.total if loss.weight is None else tf.zeros_like(loss.total)

    with keras_compat.replace_reduction(record):
        compiled = keras_compat.compiled_loss(model, y, y_pred, sample_weight)
    divided = tf.zeros([], dtype)
    if compiled is not None:
        divided += tf.cast(compiled, dtype)
    for value in added:
        divided += tf.reduce_sum(tf.cast(value, dtype)) * share

    undivided = []
    for index, (_, weight) in enumerate(losses):
        if weight is None:
            continue
        # A second call with only this loss: Keras applies its loss weight.
        with keras_compat.replace_reduction(_only(index, losses)):
            total = keras_compat.compiled_loss(model, y, y_pred, sample_weight)
        undivided.append((tf.cast(total, dtype), tf.cast(weight, dtype)))
    outputs = losses if keras_compat.loss_trackers(model) else []
    return LossSums(divided, undivided, outputs)


def _only(wanted: int, losses: Sequence[SumAndWeight]) -> keras_compat.Reduce:
    """A reduction that returns the total of loss ``wanted``, and 0 for all others."""
    calls = iter(range(len(losses)))

    def reduce(*_: Any) -> tf.Tensor:
        index = next(calls)
        value = losses[index].total
        return value if index == wanted else tf.zeros_like(value)

    return reduce


def _sum_and_weight(
    values: tf.Tensor,
    weight: Any,
    mask: Any,
    reduction: str,
    share: tf.Tensor,
    global_rows: tf.Tensor,
) -> SumAndWeight:
    """One loss' sum and weight, both divided by the number of global rows.

    That common factor cancels where both travel. It keeps gradients in float16 as large
    as in Keras' own training.
    """
    dtype = values.dtype
    if values.shape.rank == 0:  # a user's function that took the mean itself
        return SumAndWeight(values * tf.cast(share, dtype), None)
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
        return SumAndWeight(total / count, tf.reduce_sum(weight) / count)
    if reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight"):
        if mask is not None:
            return SumAndWeight(total / count, tf.reduce_sum(mask) / count)
        per_row = tf.cast(tf.reduce_prod(tf.shape(values)[1:]), dtype)
        return SumAndWeight(total / (per_row * count), None)
    return SumAndWeight(total, None)
