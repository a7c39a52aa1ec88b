"""A loss of the whole global batch, computed on each replica.

Replica r computes L(y, p_1, ..., p_R) with the predictions of all replicas. Its gradient
goes through its own predictions p_r only, so the gradients of the replicas add up to

    sum_r dL/dp_r dp_r/dw  =  dL/dw,

whatever L does with the rows. What does not go through predictions counts once on *each*
replica: the weights that a loss itself uses, and losses of the forward pass. Their
gradients are multiplied by the replica's share of the rows, and so is the value of L,
because the step sums over replicas.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from collective.training import keras_compat
from collective.training.losses import LossSums, SumAndWeight


def whole_batch_loss(
    model: keras.Model,
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    added: list[tf.Tensor],
    share: tf.Tensor,
    mapping: list[tuple[keras.Variable, tf.Tensor]],
) -> LossSums:
    """A replica's part of the loss of the global batch.

    Args:
        model: A compiled model.
        x, y, y_pred, sample_weight: The global batch (``gather_rows``).
        added: Values of ``add_loss`` and regularizers from the forward pass.
        share: Scalar, the replica's share of the global rows.
        mapping: Values of the model's variables.

    Returns:
        Sums over replicas give loss and gradient; all are divided.
    """
    dtype = tf.as_dtype(keras.config.floatx())
    share = tf.cast(share, dtype)
    scope = keras.StatelessScope(
        state_mapping=[(v, _scale_gradient(value, share)) for v, value in mapping]
    )
    with scope, keras_compat.whole_losses():
        if keras_compat.overrides(model, "compute_loss"):
            terms = [_scale_gradient(tf.cast(a, dtype), share) for a in added]
            value = keras_compat.custom_loss(model, x, y, y_pred, sample_weight, terms)
            return LossSums(_scale_value(tf.cast(value, dtype), share), [], [])
        compiled = keras_compat.compiled_loss(model, y, y_pred, sample_weight)
    divided = tf.zeros([], dtype)
    if compiled is not None:
        divided += _scale_value(tf.cast(compiled, dtype), share)
    for value in added:
        divided += tf.reduce_sum(tf.cast(value, dtype)) * share
    outputs = [
        SumAndWeight(tf.stop_gradient(_tracked(tracker, scope) * share), None)
        for tracker in keras_compat.loss_trackers(model)
    ]
    return LossSums(divided, [], outputs)


def _tracked(tracker: keras.metrics.Metric, scope: keras.StatelessScope) -> tf.Tensor:
    """The loss of one output, which Keras has given to a metric that was at zero."""
    total = scope.get_current_value(tracker.total)
    count = scope.get_current_value(tracker.count)
    return tf.cast(
        tf.math.divide_no_nan(total, count), tf.as_dtype(keras.config.floatx())
    )


def _scale_gradient(tensor: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """The tensor; its gradient is multiplied by the share."""
    if not tensor.dtype.is_floating:
        return tensor

    @tf.custom_gradient
    def same(tensor: tf.Tensor) -> Any:
        return tf.identity(
            tensor
        ), lambda upstream: upstream * tf.cast(share, upstream.dtype)

    return same(tensor)


def _scale_value(value: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """The value times the share; its gradient is that of the whole value."""

    @tf.custom_gradient
    def scaled(value: tf.Tensor) -> Any:
        return value * share, tf.identity

    return scaled(value)
