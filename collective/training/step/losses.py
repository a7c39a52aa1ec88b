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
* *undivided*: where the data decide the weight (a mask, ``mean_with_sample_weight``, a
  loss that leaves some values out), S_r and W_r travel separately and are divided after
  the all-reduce.

Only the compiled losses themselves are taken apart: one that is called by another loss,
or by a function, keeps its mean. A loss may return any number of values, such as one for
each token; nothing assumes that a row has one.

Terms from ``add_loss``, regularizers, a scalar that a loss returns, and the value of a
user's own ``compute_loss`` are means over the rows as far as we know: each replica contributes them times its share of
the rows. That is exact for a term that does not depend on the batch and for a mean over
it; a term that *sums* over the batch becomes smaller on more replicas
(docs/reference/sharp-bits.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat


class SumAndWeight(NamedTuple):
    """The sum of one loss over some rows. Scalars."""

    # S_r; divided already where ``weight`` is None. What is differentiated.
    total: tf.Tensor
    weight: tf.Tensor | None  # W_r
    # What Keras shows; the same as ``total`` but where there is no reduction.
    shown: tf.Tensor


@dataclass(frozen=True)
class LossSums:
    """The loss of some rows, as contributions to the global batch's loss."""

    divided: tf.Tensor  # scalar; its sum over replicas is the divided part of the loss
    # One ``(total, weight)`` for each undivided loss; with both summed over replicas,
    # total / weight is that part of the loss.
    undivided: list[tuple[tf.Tensor, tf.Tensor]]
    # ``(shown, weight)`` of each output's own loss, without loss weights, of a model
    # with several; weight is 0 for a divided one.
    outputs: list[tuple[tf.Tensor, tf.Tensor]]
    # The divided part as Keras shows it: without a reduction, Keras differentiates the
    # sum of the values and shows their mean.
    shown: tf.Tensor

    @property
    def totals(self) -> list[tf.Tensor]:
        """The divided part, then each undivided total: what has a gradient."""
        return [self.divided, *(total for total, _ in self.undivided)]

    @property
    def losses(self) -> list[tf.Tensor]:
        """``totals`` as Keras shows them."""
        return [self.shown, *self.totals[1:]]

    @property
    def weights(self) -> list[tf.Tensor]:
        """The weight of each undivided loss."""
        return [weight for _, weight in self.undivided]


def loss_sums(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    added: list[tf.Tensor],
    rows: tf.Tensor,
    global_rows: tf.Tensor,
    training: bool,
) -> LossSums:
    """Takes the compiled loss of a batch apart; differentiable.

    Args:
        x, y, y_pred, sample_weight: The rows of this replica and the predictions.
        added: Values of ``add_loss`` and regularizers from the forward pass.
        rows, global_rows: Scalars, the number of these rows and of the global batch's.
        training: Given to a user's own ``compute_loss``.

    Raises:
        UsageError: A loss without a reduction beside other losses.
    """
    dtype = tf.as_dtype(keras.config.floatx())
    share = tf.cast(rows, dtype) / tf.cast(global_rows, dtype)
    if keras_compat.overrides(model, "compute_loss"):
        value = keras_compat.custom_loss(
            model, x, y, y_pred, sample_weight, added, training
        )
        return _of_value(tf.cast(value, dtype), share)

    losses: list[SumAndWeight] = []

    def record(loss: Any, y: Any, y_pred: Any, weight: Any) -> tf.Tensor:
        found = keras_compat.unreduced(loss, y, y_pred, weight)
        if not isinstance(found, keras_compat.Unreduced):
            value = tf.convert_to_tensor(found)
            found = keras_compat.Unreduced(value, None, None, None, False)
        losses.append(_sum_and_weight(found, share, rows, global_rows))
        total, weight, _ = losses[-1]
        return total if weight is None else tf.zeros_like(total)

    def compiled(call: keras_compat.LossCall) -> Any:
        with keras_compat.replace_losses(model, call):
            return keras_compat.compiled_loss(model, y, y_pred, sample_weight)

    divided = shown = tf.zeros([], dtype)
    value = compiled(record)
    if value is not None:
        divided = shown = tf.cast(value, dtype)
    undivided = []
    # For each of the others another call with only that loss: Keras applies its weight.
    for index, (total, weight, other) in enumerate(losses):
        if weight is not None:
            total = compiled(_only(index, total))
            undivided.append((tf.cast(total, dtype), tf.cast(weight, dtype)))
        if other is not total and weight is None:
            _check_alone(model, losses, added)
            shown = tf.cast(compiled(_only(index, other)), dtype)
    for value in added:
        term = tf.reduce_sum(tf.cast(value, dtype)) * share
        divided, shown = divided + term, shown + term
    outputs = [
        (one, tf.zeros_like(one) if weight is None else weight)
        for _, weight, one in losses
        if keras_compat.loss_trackers(model)
    ]
    return LossSums(divided, undivided, outputs, shown)


def _of_value(value: tf.Tensor, share: tf.Tensor) -> LossSums:
    """The value of a user's ``compute_loss``: a mean over rows, or a value for each."""
    shown = tf.reduce_mean(value) * share
    divided = shown if value.shape.rank == 0 else tf.reduce_sum(value)
    return LossSums(divided, [], [], shown)


def _only(wanted: int, value: tf.Tensor) -> keras_compat.LossCall:
    """Losses of which ``wanted`` has a value, and all others are 0."""
    indices = itertools.count()

    def call(*_: Any) -> tf.Tensor:
        return value if next(indices) == wanted else tf.zeros_like(value)

    return call


def _check_alone(
    model: keras.Model, losses: Sequence[SumAndWeight], added: Sequence[Any]
) -> None:
    """Refuses what Keras adds to a vector with a value for each row."""
    if len(losses) + len(added) > 1:
        raise UsageError(
            f"a loss of model {model.name!r} has reduction=None, so it is a vector with "
            "a value for each row; Keras would add its other losses to every value",
            hint='reduction="sum_over_batch_size", or "sum"',
        )


def _sum_and_weight(
    found: keras_compat.Unreduced,
    share: tf.Tensor,
    rows: tf.Tensor,
    global_rows: tf.Tensor,
) -> SumAndWeight:
    """One loss' sum and weight, both divided by the number of global rows.

    That common factor cancels where both travel. It keeps gradients in float16 as large
    as in Keras' own training.
    """
    values, weight, mask, reduction, counted = found
    dtype = values.dtype
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
    if values.shape.rank == 0:  # a user's function that took the mean itself
        return _divided(values * tf.cast(share, dtype))
    total, size = tf.reduce_sum(values), tf.cast(tf.size(values), dtype)
    if reduction == "mean_with_sample_weight" and weight is not None:
        return _undivided(total / count, tf.reduce_sum(weight) / count)
    if reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight"):
        if mask is not None:
            return _undivided(total / count, tf.reduce_sum(mask) / count)
        if counted:
            return _undivided(total / count, size / count)
        per_row = size / tf.cast(rows, dtype)
        return _divided(total / (per_row * count))
    if reduction == "sum":
        return _divided(total)
    return SumAndWeight(total, None, total / size * tf.cast(share, dtype))


def _divided(total: tf.Tensor) -> SumAndWeight:
    return SumAndWeight(total, None, total)


def _undivided(total: tf.Tensor, weight: tf.Tensor) -> SumAndWeight:
    return SumAndWeight(total, weight, total)
