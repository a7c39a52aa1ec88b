"""Micro-batches of what needs the whole batch; see ``LocalSums``.

A loss of the whole batch takes two passes, as in GradCache [Gao, Zhang, Han and Callan,
"Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021]. The
first one computes the predictions of each micro-batch, without activations being kept.
From those of all replicas follow loss and metrics, and the gradient g of the loss with
respect to this replica's predictions p. The second pass computes each micro-batch again,
with the same random numbers, and differentiates the sum of g p: by the chain rule that is
the gradient of the loss. What a layer adds to the loss itself is added there.

Gradients of single look-ups are kept micro-batch by micro-batch, and travel once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.leaves import count_rows, first_leaf
from collective.training.input.pipeline import Batch
from collective.training.prepared import PreparedModel
from collective.training.step import finite
from collective.training.step.accumulation import accumulate_with_rows
from collective.training.step.draws import Draws
from collective.training.step.forward import Forward, Predicted, Recompute, Sums
from collective.training.step.found import Found, LookUps
from collective.training.step.inputs import (
    ReplicaRows,
    StepInputs,
    Weights,
    replica_rows,
)
from collective.training.step.local_sums import trace_pass, trace_training
from collective.training.step.losses import LossSums
from collective.training.step.metric_state import MetricState
from collective.training.step.parts import ReplicaSums
from collective.training.step.passes import TracedPass
from collective.training.step.plan import StepPlan
from collective.training.step.rows import Rows, or_none
from collective.training.variants.coupled import look_ups
from collective.training.variants.coupled.forward import CoupledForward
from collective.training.variants.coupled.gather import dense
from collective.training.variants.coupled.replica import ReplicaContext, for_replica

_WITHOUT = "drop --accumulate and --virtual-replicas"


class OwnLookUps(Forward):
    """A pass over a micro-batch that returns the gradients of its look-ups, too."""

    def train_with_look_ups(self, *args: Any) -> tuple[Any, Found]:
        """As ``train``.

        Returns:
            ``Sums`` and values and indices for each variable in ``Found.look_ups``, and
            what tracing has found.
        """
        sums, found = self.train(*args)
        slices = [each.slices for each in found.look_ups.values()]
        return (sums, [(one.values, one.indices) for one in slices]), found

    def _take_look_ups(self, gradients: list[list[Any]]) -> dict[int, LookUps]:
        return look_ups.own(gradients, self.plan)


class FirstPass(Forward):
    """The predictions of a micro-batch."""

    def predictions(
        self,
        weights: Weights,
        rows: Rows,
        global_rows: tf.Tensor,
        loss_scale: tf.Tensor,
        position: tf.Tensor,
    ) -> tuple[Any, Found]:
        """As ``train``, up to the predictions with their masks: there are no sums."""
        key = self.draws.key(position)
        state = self.draws.seeded(weights.state, key)
        scope = self._scope(Weights(weights.trainable, state), key)
        place = self._place(rows, global_rows, position[3])
        with (
            self.draws.tracing(place, key),
            scope,
            self._of_replica(rows, global_rows),
        ):
            y_pred = self._predict(rows, training=True).y_pred
        masks = [keras_compat.mask_of(leaf) for leaf in tf.nest.flatten(y_pred)]
        tensors = tf.nest.map_structure(dense, y_pred)
        return (
            (),
            (tensors, [() if mask is None else mask for mask in masks]),
        ), Found()


class Head(CoupledForward):
    """Loss and metrics of the whole batch, from predictions of this replica."""

    leaves: list[tf.Tensor]  # the predictions
    # Of the loss with respect to each of them, None for one that it does not depend on.
    # After ``train``.
    gradients: list[Any]

    def on(self, predictions: Any, masks: list[Any]) -> Head:
        """Sets the predictions."""
        self.leaves = [tf.identity(leaf) for leaf in tf.nest.flatten(predictions)]
        for leaf, mask in zip(self.leaves, masks, strict=True):
            if or_none(mask) is not None:
                keras_compat.set_mask(leaf, mask)
        self._predictions = tf.nest.pack_sequence_as(predictions, self.leaves)
        return self

    def _recomputed(
        self, tape: tf.GradientTape
    ) -> contextlib.AbstractContextManager[None]:
        tape.watch([leaf for leaf in self.leaves if leaf.dtype.is_floating])
        return contextlib.nullcontext()

    def _predict(self, rows: Rows, training: bool) -> Predicted:
        x, y, sample_weight = rows
        return Predicted(x, or_none(y), self._predictions, or_none(sample_weight))

    def _added(self, rows: Rows, global_rows: tf.Tensor) -> list[tf.Tensor]:
        return []  # the second pass has them

    def _gradients(
        self,
        tape: tf.GradientTape,
        totals: list[tf.Tensor],
        trainable: list[tf.Tensor],
        scope: keras_compat.ForwardScope,
    ) -> list[list[Any]]:
        self.gradients = [
            tape.gradient(totals[0], leaf) if leaf.dtype.is_floating else None
            for leaf in self.leaves
        ]
        return super()._gradients(tape, totals, trainable, scope)


class SecondPass(OwnLookUps):
    """Differentiates the predictions of a micro-batch, each times its gradient.

    ``Rows.y`` are the gradients: a list with ``()`` for those that are zero.
    """

    def train(
        self,
        weights: Weights,
        rows: Rows,
        global_rows: tf.Tensor,
        loss_scale: tf.Tensor,
        position: tf.Tensor,
    ) -> tuple[Sums, Found]:
        """As that of ``Forward``: the gradients have the loss scale in them already."""
        self._loss_scale = loss_scale
        one = tf.ones_like(loss_scale)
        return super().train(weights, rows, global_rows, one, position)

    def _loss(
        self,
        own: Predicted,
        added: list[tf.Tensor],
        global_rows: tf.Tensor,
        training: bool,
    ) -> LossSums:
        if added and keras_compat.overrides(self.model, "compute_loss"):
            raise UsageError(
                f"model {self.model.name!r} has a compute_loss of its own and losses of "
                "layers, which it would need before the layers are computed part by part",
                hint=f"{_WITHOUT}; or compile the loss, which Keras adds them to",
            )
        dtype = tf.as_dtype(keras.config.floatx())
        rows = tf.cast(count_rows(first_leaf(own.x)), tf.float64)
        share = tf.cast(rows / tf.cast(global_rows, tf.float64), dtype)
        means = [tf.reduce_sum(tf.cast(value, dtype)) for value in added]
        shown = tf.add_n([tf.zeros([], dtype), *means]) * share
        terms = [
            tf.reduce_sum(dense(leaf) * gradient)
            for leaf, gradient in zip(tf.nest.flatten(own.y_pred), own.y, strict=True)
            if or_none(gradient) is not None
        ]
        scaled = shown * tf.cast(self._loss_scale, dtype)
        total = tf.add_n([scaled, *(tf.cast(term, dtype) for term in terms)])
        return LossSums(total, [], [], shown)

    def _metrics(
        self,
        scope: keras_compat.ForwardScope,
        rows: Rows,
        global_rows: tf.Tensor,
        seen: Any,
    ) -> list[tf.Tensor]:
        return scope.values(self._metric_variables)  # what layers have counted


class CoupledMicroBatches:
    """Sums micro-batch by micro-batch, with collectives after them.

    Args:
        pieces: As of ``Forward``.
        recompute: In the pass that is differentiated.
        plan: What needs the whole batch.

    Raises:
        UsageError: The loss draws random numbers, or assigns variables.
    """

    counts_replicas = True

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        draws: Draws,
        pieces: tuple[int, int],
        recompute: Recompute | None,
        plan: StepPlan,
        spec: Batch,
        *,
        maybe_empty: bool,
        jit_compile: bool,
    ):
        self.prepared = prepared
        self.backend = backend
        self.draws = draws
        self.pieces = pieces
        self.maybe_empty = maybe_empty
        # A loss that is a sum over rows is one of the whole batch as well.
        couples = plan.gather_loss or plan.gather_metrics
        self.plan = dataclasses.replace(plan, gather_loss=couples)
        self.metrics = MetricState(prepared.model) if plan.gather_metrics else None
        forward = Forward(prepared, draws, pieces, plan=plan)
        self.traced = trace_training(forward, spec)
        self.first: TracedPass | None = None
        if couples:
            first = FirstPass(prepared, draws, pieces, plan=plan)
            self.first = trace_pass(first.predictions, prepared, spec, jit_compile)
            _, (predictions, _) = self.first.shapes
            leaves = [
                tf.TensorSpec(leaf.shape, leaf.dtype) if leaf.dtype.is_floating else ()
                for leaf in tf.nest.flatten(predictions)
            ]
            spec = spec._replace(y=leaves, sample_weight=None)
        kind = SecondPass if couples else OwnLookUps
        last = kind(prepared, draws, pieces, recompute, plan)
        self.last = trace_pass(last.train_with_look_ups, prepared, spec, jit_compile)

    def rows(self, batch: Batch, replica: tf.Tensor) -> ReplicaRows:
        """The rows of a replica."""
        return replica_rows(self.backend, batch, replica)

    def __call__(self, inputs: StepInputs) -> ReplicaSums:
        """Inside ``Backend.run``: the sums of this replica."""

        def run(replica: ReplicaContext, rows: Rows) -> tuple[Sums, Found]:
            if self.first is None:
                return self._last(inputs, replica, rows)
            _, predictions = self._pass(self.first, inputs, rows)
            head, of_head, gradients = self._head(inputs, replica, rows, predictions)
            sums, found = self._last(inputs, replica, Rows(rows.x, gradients, ()))
            return added_to(head, of_head, sums, found, replica)

        sums, found = for_replica(
            run,
            *(self.backend, inputs.rows, inputs.count, inputs.global_rows),
            maybe_empty=self.maybe_empty,
        )
        not_finite = finite.first_of(sums, found, len(inputs.weights.trainable))
        return ReplicaSums(sums, not_finite, found)

    def _pass(self, traced: TracedPass, inputs: StepInputs, rows: Rows) -> Any:
        """One pass over all micro-batches."""

        def compute(micro_batch: tf.Tensor, start: tf.Tensor, rows: Rows) -> Any:
            return traced.function(*inputs.of_pass(rows, micro_batch, start))

        count = tf.maximum(inputs.count, 1)  # for_replica has made up a row
        micro_batches = self.pieces[1]
        return accumulate_with_rows(compute, traced.shapes, count, rows, micro_batches)

    def _last(
        self, inputs: StepInputs, replica: ReplicaContext, rows: Rows
    ) -> tuple[Sums, Found]:
        sums, slices = self._pass(self.last, inputs, rows)
        found = self.last.found
        whole = look_ups.gathered(self._look_ups(slices), replica)
        return sums, dataclasses.replace(found, look_ups=whole)

    def _look_ups(self, slices: Any) -> dict[int, LookUps]:
        """The record of look-ups, with these values and indices."""
        found = {}
        pairs = zip(self.last.found.look_ups.items(), slices, strict=True)
        for (place, each), (values, indices) in pairs:
            # A tensor, as Keras' RMSprop takes it.
            whole = tuple(self.prepared.trainable[place].shape)
            shape = tf.constant(whole, indices.dtype)
            found[place] = each._replace(
                slices=tf.IndexedSlices(values, indices, shape)
            )
        return found

    def _head(
        self,
        inputs: StepInputs,
        replica: ReplicaContext,
        rows: Rows,
        predictions: Any,
    ) -> tuple[Sums, Found, list[Any]]:
        """Loss and metrics; and the gradient of each prediction."""
        values = self.metrics.unpack(inputs.metrics) if self.metrics else None
        head = Head(
            *(self.prepared, self.draws, self.pieces, None, self.plan, replica, values)
        ).on(*predictions)
        sums, found = head.train(*inputs.of_pass(rows))
        if found.changing or found.seeds.asked or found.overwritten:
            raise UsageError(
                f"the loss of model {self.prepared.model.name!r} draws random numbers or "
                "assigns variables, and is computed apart from the model's layers",
                hint=_WITHOUT,
            )
        return (
            sums,
            found,
            [
                ()
                if not leaf.dtype.is_floating
                else tf.zeros_like(leaf)
                if gradient is None
                else tf.convert_to_tensor(gradient)
                for leaf, gradient in zip(head.leaves, head.gradients, strict=True)
            ],
        )


def added_to(
    head: Sums, of_head: Found, sums: Sums, found: Found, replica: ReplicaContext
) -> tuple[Sums, Found]:
    """Both passes' sums; the loss may use weights itself."""
    of_variables = dict(zip(found.connected, *sums.gradients or [[]], strict=True))
    for place, gradient in zip(of_head.connected, *head.gradients or [[]], strict=True):
        before = of_variables.get(place)
        of_variables[place] = gradient if before is None else before + gradient
    connected = tuple(sorted(of_variables))
    has_divided = bool(sums.gradients or head.gradients)
    return sums._replace(
        gradients=[[of_variables[place] for place in connected]] if has_divided else [],
        losses=[
            one + other for one, other in zip(head.losses, sums.losses, strict=True)
        ],
        outputs=head.outputs,
        metrics=[
            one + replica.own(other)
            for one, other in zip(head.metrics, sums.metrics, strict=True)
        ],
    ), dataclasses.replace(found, connected=connected, has_divided=has_divided)
