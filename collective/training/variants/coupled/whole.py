"""Loss and metrics of the whole global batch, computed on each replica.

Replica r computes the loss L(y, p_1, ..., p_R) with the predictions of all replicas. Its
gradient goes through its own predictions p_r only, so the gradients of the replicas add
up to

    sum_r dL/dp_r dp_r/dw  =  dL/dw,

whatever L does with the rows. What does not go through predictions is there once on
*each* replica: the weights that a loss itself uses, and losses of the forward pass. Their
gradients are multiplied by the replica's share of the rows, and so is the value of L,
because the step sums over replicas. Metrics are those of replica 0.

Such a metric continues from its values after the step before, as in Keras: a maximum
needs the former one. The values travel from step to step as one vector, the last part of
a step's report. No variable of a metric is read or written meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.prepared import PreparedModel
from collective.training.step.forward import Predicted
from collective.training.step.losses import LossSums
from collective.training.variants.coupled.gather import gather_rows
from collective.training.variants.coupled.replica import ReplicaContext


def gather(model: keras.Model, own: Predicted, replica: ReplicaContext) -> Predicted:
    """The rows of all replicas, in the order of the global batch.

    x is large, and is gathered for a loss or metrics of the model's own only.
    """
    own_code = ("compute_loss", "compute_metrics")
    if not any(keras_compat.overrides(model, name) for name in own_code):
        own = own._replace(x=None)
    present = {k: part for k, part in own._asdict().items() if part is not None}
    return own._replace(**gather_rows(present, replica))


@dataclass
class WholeBatch:
    """One global batch on one replica."""

    model: keras.Model
    rows: Predicted
    replica: ReplicaContext
    metric_variables: Sequence[keras.Variable]
    # Values of the variables, to continue from; None: from zero.
    metric_state: list[tf.Tensor] | None

    def loss(
        self,
        forward: keras_compat.ForwardScope,
        prepared: PreparedModel,
        added: list[tf.Tensor],
        training: bool,
    ) -> LossSums:
        """This replica's part of the loss.

        Args:
            forward: The scope of the forward pass, which has ended; takes over what the
                loss assigns to the model's state.
            added: Values of ``add_loss`` and regularizers from the forward pass.

        Returns:
            Sums over replicas give loss and gradient; none needs to be divided.

        Raises:
            UsageError: The loss assigns variables, or is a vector beside other losses.
        """
        model, rows, trainable = self.model, self.rows, prepared.trainable
        dtype = tf.as_dtype(keras.config.floatx())
        share = tf.cast(self.replica.share, dtype)
        mapping = [
            (v, _scale_gradient(value, share))
            for v, value in zip(trainable, forward.values(trainable), strict=True)
        ]
        trackers = keras_compat.loss_trackers(model)
        mapping += [
            (v, tf.zeros(v.shape, v.dtype)) for m in trackers for v in m.variables
        ]
        if self.metric_state is not None:
            mapping += zip(self.metric_variables, self.metric_state, strict=True)
        with forward.continued(mapping) as scope, keras_compat.whole_losses():
            if keras_compat.overrides(model, "compute_loss"):
                terms = [_scale_gradient(tf.cast(a, dtype), share) for a in added]
                value = keras_compat.custom_loss(model, *rows, terms, training)
                added = []
            else:
                value = keras_compat.compiled_loss(model, *rows[1:])
        if scope.unknown:
            raise UsageError(
                f"the loss assigns variable {scope.unknown[0].path!r}, and is computed on "
                "the predictions of all replicas",
                hint="assign it in the call of a layer",
            )
        forward.take_over(scope, prepared.state)
        if self.metric_state is not None:
            self.metric_state = scope.values(self.metric_variables)
        total, shown = _contribution(model, value, added, share)
        shares = [_tracked(tracker, scope) * share for tracker in trackers]
        outputs = [(output, tf.zeros_like(output)) for output in shares]
        return LossSums(total, [], outputs, shown)

    def metrics(self, counted: list[tf.Tensor]) -> list[tf.Tensor]:
        """Contributions to the values of the metrics' variables after this batch.

        Args:
            counted: What the forward pass of this replica's own rows has counted in
                them, from zero.
        """
        assert self.metric_state is not None
        after = keras_compat.metric_sums(self.model, self.metric_state, *self.rows)
        first = self.replica.number == 0
        return [
            tf.where(first, value, tf.zeros_like(value)) + self.replica.own(own)
            for value, own in zip(after, counted, strict=True)
        ]


def _contribution(
    model: keras.Model, value: Any, added: list[tf.Tensor], share: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """What a replica adds to the loss that is differentiated, and to the one shown."""
    total = shown = tf.zeros([], share.dtype)
    if value is not None:
        value = tf.cast(value, share.dtype)
        if value.shape.rank and added:
            raise UsageError(
                f"the loss of model {model.name!r} is a vector, and Keras would add its "
                "other losses to every value",
                hint='reduction="sum_over_batch_size", or "sum"',
            )
        # Of a vector, Keras differentiates the sum and shows the mean.
        total = _scale_value(tf.reduce_sum(value), share)
        shown = tf.reduce_mean(value) * share
    for term in added:
        more = tf.reduce_sum(tf.cast(term, share.dtype)) * share
        total, shown = total + more, shown + more
    return total, shown


def _tracked(
    tracker: keras.metrics.Mean, scope: keras_compat.ForwardScope
) -> tf.Tensor:
    """The loss of one output, which Keras has given to a metric that was at zero."""
    total, count = scope.values([tracker.total, tracker.count])
    return tf.cast(
        tf.math.divide_no_nan(total, count), tf.as_dtype(keras.config.floatx())
    )


def _scale_gradient(tensor: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """The tensor; its gradient is multiplied by the share."""
    if not tensor.dtype.is_floating:
        return tensor

    @tf.custom_gradient
    def same(tensor: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return upstream * tf.cast(share, upstream.dtype)

        return tf.identity(tensor), gradient

    return same(tensor)


def _scale_value(value: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """The value times the share; its gradient is that of the whole value."""

    @tf.custom_gradient
    def scaled(value: tf.Tensor) -> Any:
        return value * share, tf.identity

    return scaled(value)
