"""One optimizer update, the same under every backend.

    local sums -> all-reduce -> check that all is finite -> / global weight
               -> un-scale -> clip -> weight decay -> update -> constraints -> average

``Step._replica_step`` is that line in code. Clipping after the sum makes N replicas
train the model that one would train. Everything from *un-scale* on is Keras' own
optimizer, given gradients that are sums over all replicas already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.training import finite, keras_compat
from collective.training.accumulation import accumulate
from collective.training.attachments import Attachment, ReplicaStep, Total
from collective.training.forward import Forward, Sums, global_loss
from collective.training.input.pipeline import Batch
from collective.training.prepared import PreparedModel
from collective.training.reduction import StepSums, all_reduce
from collective.training.reporting.report import Layout
from collective.training.step_inputs import (
    Rows,
    StepInputs,
    Weights,
    read_weights,
    replica_rows,
    weight_specs,
    without_none,
)
from collective.training.variables import all_variables


class Step:
    """The training step of a model on a backend.

    Args:
        prepared: The model, with all of its variables.
        backend: Sums the gradients.
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        accumulate: Micro-batches per update and replica.
        jit_compile: Whether XLA compiles the forward and backward pass.
        recompute: Whether activations are recomputed instead of kept.
        seed: Random layers draw from it, with step, replica and micro-batch.
        maybe_empty: Whether a replica may have a batch without rows.
        attachments: What else travels in the all-reduce.

    Attributes:
        layout: What the numbers of a report mean.

    Raises:
        CollectiveError: In the call, on every rank, when loss or gradients are not
            finite (nothing is applied then), or when an attachment raises it.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        spec: Batch,
        *,
        accumulate: int = 1,
        jit_compile: bool = False,
        recompute: bool = False,
        seed: int = 0,
        maybe_empty: bool = True,
        attachments: Sequence[Attachment] = (),
    ):
        self.prepared = prepared
        self.model = prepared.model
        self.optimizer = prepared.model.optimizer
        self.backend = backend
        self.micro_batches = accumulate
        self.maybe_empty = maybe_empty
        self.attachments = list(attachments)
        self.forward = Forward(prepared, seed, recompute)
        self.layout = Layout(self.model)
        self._attached_sizes: list[int] = []
        keras_compat.switch_off_gradient_sum(self.optimizer)
        if not backend.synchronous:
            keras_compat.count_atomically(self.optimizer)
        dtypes = {v.dtype for v in self.model.trainable_variables}
        self.dtype = tf.float64 if "float64" in dtypes else tf.float32
        self._trace(without_none(spec), jit_compile)

    def _trace(self, spec: Batch, jit_compile: bool) -> None:
        """Makes the TensorFlow functions.

        The first two are traced here, outside any strategy: they touch no variable, and
        their outputs must be known before the loop over micro-batches is traced.
        """
        weights = weight_specs(self.model)
        rows = Rows(spec.x, spec.y, spec.sample_weight)
        scalar = tf.TensorSpec([], tf.int64)
        scale = tf.TensorSpec([], tf.float32)
        colocated = self.prepared.colocated
        self._micro_batch = tf.function(
            colocated(self.forward.train),
            input_signature=(
                weights,
                rows,
                scalar,
                scale,
                tf.TensorSpec([3], tf.int64),
            ),
            jit_compile=jit_compile,
            autograph=False,
        )
        traced = self._micro_batch.get_concrete_function()
        self._sums_spec: Sums = traced.structured_outputs[0]
        self._local_sums = tf.function(
            colocated(self._sum_micro_batches),
            input_signature=(
                StepInputs(weights, rows, scalar, scalar, scale, scalar, scalar),
            ),
            autograph=False,
        )
        self._local_sums.get_concrete_function()
        self._run = tf.function(
            lambda batch, number: self.backend.run(
                colocated(self._replica_step), (batch, number)
            ),
            input_signature=(spec, scalar),
            autograph=False,
        )

    def __call__(self, batch: Batch, number: int) -> Any:
        """Trains on one global batch.

        Args:
            batch: This process' slice of it.
            number: The number of the step in this training, from 0.

        Returns:
            The report (``collective.training.reporting.report``), then the totals of
            the attachments; the same on every rank. See ``Backend.call``.
        """
        for attachment in self.attachments:
            attachment.prepare()
        args = (without_none(batch), tf.constant(number, tf.int64))
        report = self.backend.call(self._run, args, self._explain)
        start = self.layout.size
        for attachment, size in zip(
            self.attachments, self._attached_sizes, strict=True
        ):
            attachment.receive(Total(report, start, start + size), number)
            start += size
        return report

    def outside_variables(self) -> list[tf.Variable]:
        """Variables that the forward pass reads and that are none of the model's."""
        known = {id(keras_compat.tf_variable(v)) for v in all_variables(self.model)}
        read = self._micro_batch.get_concrete_function().graph.variables
        return [v for v in read if id(v) not in known]

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        if self.prepared.partition is not None:
            self.prepared.partition.finish()
            return
        with self.backend.scope():
            keras_compat.finish(self.optimizer, self.model.trainable_variables)

    def _replica_step(self, batch: Batch, number: tf.Tensor) -> tf.Tensor:
        """The update of one replica, inside ``Backend.run``; returns the report."""
        backend = self.backend
        replica = tf.cast(backend.replica(), tf.int64)
        own = replica_rows(backend, batch, replica)
        inputs = StepInputs(
            read_weights(self.model),
            own.rows,
            own.count,
            batch.global_rows,
            keras_compat.loss_scale(self.optimizer),
            number,
            replica,
        )

        # forward and backward pass: sums over this replica's rows
        sums, new_state = self._local_sums(inputs)
        sums = self._beside_variables(sums)
        this_step = ReplicaStep(number, replica, own.rows_read)
        local = StepSums(
            sums,
            self._state_changes(inputs, new_state),
            finite.locate(sums, backend),
            [attachment.contribution(this_step) for attachment in self.attachments],
        )

        # all-reduce
        partition = self.prepared.partition
        total, span = all_reduce(
            local, self.dtype, backend, partition, self.attachments
        )

        # check: every write waits for it. Weight decay, the optimizer's counter and the
        # state do not depend on the gradients, and must not change without them. Every
        # write waits for every sum, too: when a rank dies, a step is whole or absent.
        with tf.control_dependencies([span.stop, *self._check(total, number)]):
            # divide by the global weight
            gradients = self._divide(total.sums)
            # un-scale, clip, weight decay, update, constraints, average
            self._apply(gradients)
            self._assign_state(inputs.weights, total.state_changes)
        return self._report(batch, total, span)

    def _sum_micro_batches(self, inputs: StepInputs) -> tuple[Sums, list[tf.Tensor]]:
        """Sums over a replica's rows, and the changing state after them. Pure."""
        changing, weights = self.forward.changing, inputs.weights

        def compute(
            micro_batch: tf.Tensor, rows: Rows, changed: list[tf.Tensor]
        ) -> tuple[Sums, list[tf.Tensor]]:
            state = list(weights.state)
            for i, value in zip(changing, changed, strict=True):
                state[i] = value
            sums, new_state = self._micro_batch(
                weights._replace(state=state),
                rows,
                inputs.global_rows,
                inputs.loss_scale,
                tf.stack(
                    [inputs.number, inputs.replica, tf.cast(micro_batch, tf.int64)]
                ),
            )
            return self._beside_variables(sums), new_state

        return accumulate(
            compute,
            lambda: tf.nest.map_structure(
                lambda t: tf.zeros(t.shape, t.dtype), self._sums_spec
            ),
            [weights.state[i] for i in changing],
            inputs.count,
            inputs.rows,
            self.micro_batches,
            self.maybe_empty,
        )

    def _beside_variables(self, sums: Sums) -> Sums:
        """Where layers are on several devices: gradients beside their variables."""
        placement = self.prepared.placement
        if placement is None:
            return sums
        variables = [self.model.trainable_variables[i] for i in self.forward.connected]
        gradients = [placement.colocate(terms, variables) for terms in sums.gradients]
        return sums._replace(gradients=gradients)

    def _state_changes(
        self, inputs: StepInputs, new_state: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Changes of the state, times this replica's share of the rows."""
        count, global_rows = inputs.count, inputs.global_rows
        share = tf.cast(count, self.dtype) / tf.cast(global_rows, self.dtype)
        old = inputs.weights.state
        return [
            (tf.cast(new, self.dtype) - tf.cast(old[i], self.dtype)) * share
            for i, new in zip(self.forward.changing, new_state, strict=True)
        ]

    def _check(self, total: StepSums, number: tf.Tensor) -> list[tf.Operation]:
        """A LossScaleOptimizer expects overflows, and skips the update itself."""
        if keras_compat.expects_overflow(self.optimizer):
            return []
        return finite.check(total.not_finite, number, self.backend)

    def _divide(self, sums: Sums) -> list[tf.Tensor]:
        """The gradient of the global loss for each connected variable."""
        divided = self.forward.has_divided  # the first list needs no division
        divisors = [tf.ones([], self.dtype)] if divided else []
        divisors += sums.weights
        gradients = []
        for terms, i in zip(
            zip(*sums.gradients, strict=True), self.forward.connected, strict=True
        ):
            quotients = [
                term if divided and place == 0 else tf.math.divide_no_nan(term, divisor)
                for place, (term, divisor) in enumerate(
                    zip(terms, divisors, strict=True)
                )
            ]
            variable = self.model.trainable_variables[i]
            gradients.append(tf.cast(tf.add_n(quotients), variable.dtype))
        return gradients

    def _apply(self, gradients: list[tf.Tensor]) -> None:
        """Keras' optimizer."""
        connected = self.forward.connected
        if self.prepared.partition is not None:
            self.prepared.partition.apply(gradients, connected)
            return
        variables = [self.model.trainable_variables[i] for i in connected]
        keras_compat.apply(self.optimizer, gradients, variables, self.backend.assign)

    def _assign_state(self, weights: Weights, changes: list[tf.Tensor]) -> None:
        """The state after the weighted mean of the replicas' changes."""
        changing = self.forward.changing
        variables = [self.model.non_trainable_variables[i] for i in changing]
        self.backend.assign(
            [keras_compat.tf_variable(v) for v in variables],
            [
                _changed(weights.state[i], change)
                for i, change in zip(changing, changes, strict=True)
            ],
        )

    def _report(self, batch: Batch, total: StepSums, span: Any) -> tf.Tensor:
        """Everything that ranks want to know of the step, as one vector."""
        loss, outputs = global_loss(total.sums)
        self._attached_sizes = [
            sum(t.shape.num_elements() for t in tensors) for tensors in total.attached
        ]
        return self.layout.pack(
            loss,
            batch.global_rows,
            span,
            outputs,
            total.sums.metrics,
            tf.nest.flatten(total.attached),
        )

    def _explain(self, error: Exception) -> Exception:
        variables = self.model.trainable_variables
        paths = [variables[i].path for i in self.forward.connected]
        return finite.explain(error, self.backend, paths)


def _changed(old: tf.Tensor, change: tf.Tensor) -> tf.Tensor:
    if old.dtype.is_integer:
        change = tf.round(change)
    return old + tf.cast(change, old.dtype)
