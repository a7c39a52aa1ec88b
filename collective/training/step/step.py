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

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import compatibility, keras_compat
from collective.training.input.pipeline import Batch
from collective.training.prepared import PreparedModel
from collective.training.step import finite, layer_state, look_ups
from collective.training.step.accumulation import accumulate
from collective.training.step.attachments import Attachment, Attachments, ReplicaStep
from collective.training.step.draws import explained, warn_of_draws
from collective.training.step.forward import Forward, Sums, global_loss
from collective.training.step.inputs import (
    StepInputs,
    Weights,
    process_rows,
    read_weights,
    replica_rows,
    weight_specs,
)
from collective.training.step.plan import StepPlan
from collective.training.step.reduction import Span, StepSums, all_reduce
from collective.training.step.report import Layout
from collective.training.step.rows import Rows, without_none
from collective.training.step.xla import compiled_around_collectives
from collective.training.variables import register_outside_variables
from collective.training.variants.coupled import batch_norm
from collective.training.variants.coupled import checks as coupled_checks
from collective.training.variants.coupled.replica import for_replica
from collective.training.variants.coupled.whole import MetricState
from collective.training.variants.virtual.pieces import VirtualReplicas
from collective.training.variants.virtual.reduction import rows_read, sum_pieces


class Step:
    """The training step of a model on a backend.

    Args:
        prepared: The model, with all of its variables.
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        accumulate: Micro-batches per update and replica.
        jit_compile: Whether XLA compiles the forward and backward pass.
        recompute: Whether activations are recomputed instead of kept.
        seed: Random layers draw from it, with the number of the step; None: from their
            own states, as in Keras. See ``collective.training.step.draws``.
        maybe_empty: Whether a replica may have a batch without rows.
        attachments: What else travels in the all-reduce.
        plan: Whether loss and metrics are those of the whole global batch.
        sync_batch_norm: Whether every layer of batch normalization has the statistics
            of the whole global batch; otherwise those with ``synchronized=True`` do.
        virtual: The virtual replicas into which each global batch is cut; None: each
            replica's rows are one piece.

    Attributes:
        layout: What the numbers of a report mean.

    Raises:
        UsageError: The plan or ``sync_batch_norm`` cannot be combined with the rest.
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
        seed: int | None = None,
        maybe_empty: bool = True,
        attachments: Sequence[Attachment] = (),
        plan: StepPlan | None = None,
        sync_batch_norm: bool = False,
        virtual: VirtualReplicas | None = None,
    ):
        plan = plan or StepPlan()
        coupling = coupled_checks.features(
            prepared.model, backend, plan, sync_batch_norm, virtual is not None
        )
        options = {
            "accumulate": accumulate > 1,
            "jit_compile": jit_compile,
            "recompute": recompute,
            "virtual_replicas": virtual is not None,
        }
        compatibility.check(coupling | {k for k, on in options.items() if on}, backend)
        self.coupled = bool(coupling)
        self.jit_compile = jit_compile
        self.sync_batch_norm = sync_batch_norm
        self.prepared = prepared
        self.model = prepared.model
        self.optimizer = prepared.model.optimizer
        self.backend = backend
        self.micro_batches = accumulate
        self.virtual = virtual
        self.maybe_empty = maybe_empty
        self.attachments = Attachments(attachments)
        pieces = virtual.count if virtual else backend.most_replicas
        if not backend.synchronous:  # workers do not share a batch, nor its draws
            seed, pieces = seed or 0, 1
        self.forward = Forward(
            *(prepared, seed, recompute, pieces, accumulate, plan),
            draws_by_piece=virtual is not None or not backend.synchronous,
        )
        self._seed = seed
        self.layout = Layout(self.model, plan.gather_metrics)
        self._metric_state = MetricState(self.model) if plan.gather_metrics else None
        self._metrics: tf.Tensor = tf.zeros([0], tf.float64)
        self.begin_epoch()
        keras_compat.switch_off_gradient_sum(self.optimizer)
        if not backend.synchronous:
            keras_compat.count_atomically(self.optimizer)
        dtypes = {v.dtype for v in prepared.trainable}
        self.dtype = tf.float64 if "float64" in dtypes else tf.float32
        self._trace(without_none(spec), jit_compile)

    def _trace(self, spec: Batch, jit_compile: bool) -> None:
        """Makes the TensorFlow functions.

        The first two are traced here, outside any strategy: they touch no variable, and
        their outputs must be known before the loop over micro-batches is traced. Where
        the forward pass has collectives, it is a part of the third.
        """
        weights = weight_specs(self.prepared)
        rows = Rows(spec.x, spec.y, spec.sample_weight)
        scalar = tf.TensorSpec([], tf.int64)
        scale = tf.TensorSpec([], tf.float32)
        position = tf.TensorSpec([4], tf.int64)
        colocated = self.prepared.colocated
        forward = self.forward
        if self.coupled:  # only to find the variables outside of the model
            forward = Forward(
                *(self.prepared, self._seed), replicas=self.forward.pieces[0]
            )
        self._micro_batch = tf.function(
            colocated(forward.train),
            input_signature=(weights, rows, scalar, scale, position),
            jit_compile=jit_compile and not self.coupled,
            autograph=False,
        )
        traced = self._micro_batch.get_concrete_function()
        self._check_partition(forward)
        register_outside_variables(self.prepared, self.backend, traced)
        if self.backend.rank == 0 and not self.forward.plan.gather_look_ups:
            combined = [self.prepared.trainable[i] for i in forward.combined]
            look_ups.note(combined, self.optimizer)
        if self.backend.rank == 0:
            warn_of_draws(self.model, forward.draws.others)
        self._run_signature = spec, scalar, tf.TensorSpec([None], tf.float64)
        self._runs: dict[Any, Any] = {}
        if self.coupled:
            return
        self._sums_spec: Sums = traced.structured_outputs
        self._local_sums = tf.function(
            colocated(self._sum_micro_batches),
            input_signature=(
                StepInputs(
                    weights, rows, scalar, scalar, scale, scalar, scalar, scalar
                ),
            ),
            autograph=False,
        )
        self._local_sums.get_concrete_function()

    def _check_partition(self, forward: Forward) -> None:
        """Refuses what a rank with shards of variables cannot do, once it was traced."""
        tensor = self.backend.tensor is not None
        places = forward.overwritten + (forward.assigned if tensor else [])
        if self.prepared.partition is not None and places:
            raise UsageError(
                f"a layer sets {self.prepared.trainable[places[0]].path!r} itself, which "
                "this rank may hold a part of",
                hint="drop --tensor-parallel or --shard-optimizer",
            )

    def __call__(self, batch: Batch, number: int) -> Any:
        """Trains on one global batch.

        Args:
            batch: This process' slice of it.
            number: The number of the step in this training, from 0.

        Returns:
            The report (``collective.training.step.report``), then the totals of
            the attachments; the same on every rank. See ``Backend.call``.
        """
        self.attachments.prepare()
        args = (without_none(batch), tf.constant(number, tf.int64), self._metrics)
        report = self.backend.call(self._run, args, self._explain)
        size = self.layout.size
        if self._metric_state is not None:
            self._metrics = self._metric_state.end_of(report[:size])
        self.attachments.receive(report, size, number)
        return report

    @property
    def graph(self) -> tf.Graph:
        """The forward and backward pass as it was traced: the same on every rank."""
        return self._micro_batch.get_concrete_function().graph

    def begin_epoch(self, sums: np.ndarray | None = None) -> None:
        """Metrics of the whole global batch start from zero, as in Keras.

        An epoch may continue where it stopped: ``sums`` are its ``Averages.sums``.
        """
        state = self._metric_state
        if state is None:
            return
        if sums is not None and sums[self.layout.ROWS]:
            self._metrics = tf.constant(state.end_of(sums))
        else:
            self._metrics = state.reset()

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        if self.prepared.partition is not None:
            self.prepared.partition.finish()
            return
        with self.backend.scope():
            keras_compat.finish(self.optimizer, self.prepared.trainable)

    @property
    def _run(self) -> Any:
        """The step; traced again for another number of replicas where it has a number."""
        backend = self.backend
        numbered = self.virtual is not None or self.coupled
        key = (backend.local_replicas, backend.replicas) if numbered else None
        if key not in self._runs:
            self._runs[key] = tf.function(
                self._run_replicas,
                input_signature=self._run_signature,
                autograph=False,
            )
        return self._runs[key]

    def _run_replicas(self, batch: Batch, number: tf.Tensor, metrics: tf.Tensor) -> Any:
        """Inside the ``tf.function``: the report, after an update on every replica."""
        step = self.prepared.colocated(self._replica_step)
        with batch_norm.synchronized(self.sync_batch_norm):
            return self.backend.run(step, (batch, number, metrics))

    def _replica_step(
        self, batch: Batch, number: tf.Tensor, metrics: tf.Tensor
    ) -> tf.Tensor:
        """The update of one replica, inside ``Backend.run``; returns the report."""
        backend = self.backend
        replica = tf.cast(backend.replica(), tf.int64)
        if self.virtual is None:
            own = replica_rows(backend, batch, replica)
        else:
            own = process_rows(batch, 0)._replace(  # pieces know their own
                rows_read=rows_read(self.virtual, backend, batch)
            )
        inputs = StepInputs(
            read_weights(self.prepared),
            own.rows,
            own.count,
            batch.global_rows,
            keras_compat.loss_scale(self.optimizer),
            number,
            replica,
            own.first,
        )
        this_step = ReplicaStep(number, replica, own.rows_read)
        attached = self.attachments.contributions(this_step)

        # forward and backward pass, all-reduce
        if self.virtual is None:
            total, span = self._sum_replicas(inputs, metrics, attached)
        else:
            total, span = sum_pieces(
                self.virtual,
                backend,
                inputs,
                self._local_sums,
                self._sums_spec,
                self.dtype,
                attached,
            )

        # check: every write waits for it. Weight decay, the optimizer's counter and the
        # state do not depend on the gradients, and must not change without them. Every
        # write waits for every sum, too: when a rank dies, a step is whole or absent.
        with tf.control_dependencies([span.stop, *self._check(total, number)]):
            # divide by the global weight
            gradients = self._divide(total.sums)
            # what layers assign: the update then changes that
            self._assign_state(inputs.weights, total.sums.state)
            self.forward.draws.advances.advance(backend.assign)
            # un-scale, clip, weight decay, update, constraints, average
            self._apply(gradients, total.sums)
        return self._report(batch, total, span)

    def _sum_replicas(
        self, inputs: StepInputs, metrics: tf.Tensor, attached: list[list[tf.Tensor]]
    ) -> tuple[StepSums, Span]:
        """The sums over this replica's rows, then over all replicas."""
        backend = self.backend
        if self.coupled:
            sums = self._coupled_sums(inputs, metrics)
        else:
            sums = self._beside_variables(self._local_sums(inputs))
        of_look_ups = [
            tf.cast(tf.reduce_sum(each.slices.values), sums.losses[0].dtype)
            for each in self.forward.look_ups.values()
        ]
        not_finite = finite.first_of(sums, of_look_ups)
        return all_reduce(
            StepSums(sums, finite.at_replica(not_finite, backend), attached),
            self.dtype,
            backend,
            self.prepared.partition,
            self.attachments,
        )

    def _sum_micro_batches(self, inputs: StepInputs) -> Sums:
        """Sums over a replica's rows. Pure."""

        def compute(micro_batch: tf.Tensor, start: tf.Tensor, rows: Rows) -> Sums:
            first = inputs.first_row + tf.cast(start, tf.int64)
            micro_batch = tf.cast(micro_batch, tf.int64)
            sums = self._micro_batch(
                inputs.weights,
                rows,
                inputs.global_rows,
                inputs.loss_scale,
                tf.stack([inputs.number, inputs.replica, micro_batch, first]),
            )
            return self._beside_variables(sums)

        return accumulate(
            compute,
            self._sums_spec,
            inputs.count,
            inputs.rows,
            self.micro_batches,
            self.maybe_empty,
        )

    def _coupled_sums(self, inputs: StepInputs, metrics: tf.Tensor) -> Sums:
        """As ``_sum_micro_batches``, of all rows at once, with collectives."""
        state = self._metric_state
        values = None if state is None else state.unpack(metrics)
        micro_batch = tf.zeros([], tf.int64)
        train = self.forward.train
        if self.jit_compile:
            train = compiled_around_collectives(train)
        return for_replica(
            lambda rows: train(
                inputs.weights,
                rows,
                inputs.global_rows,
                inputs.loss_scale,
                tf.stack(
                    [inputs.number, inputs.replica, micro_batch, inputs.first_row]
                ),
                values,
            ),
            *(self.backend, inputs.rows, inputs.count, inputs.global_rows),
            maybe_empty=self.maybe_empty,
        )

    def _beside_variables(self, sums: Sums) -> Sums:
        """Where layers are on several devices: gradients beside their variables."""
        placement = self.prepared.placement
        if placement is None:
            return sums
        variables = [self.prepared.trainable[i] for i in self.forward.connected]
        gradients = [placement.colocate(terms, variables) for terms in sums.gradients]
        return sums._replace(gradients=gradients)

    def _check(self, total: StepSums, number: tf.Tensor) -> list[tf.Operation]:
        """A LossScaleOptimizer expects overflows, and skips the update itself."""
        if keras_compat.expects_overflow(self.optimizer):
            return []
        checks = finite.check(total.not_finite, number, self.backend)
        if self.backend.rounds_to is not None:
            gradients = total.sums.gradients
            checks += finite.check_transport(gradients, total.not_finite, number)
        return checks

    def _divide(self, sums: Sums) -> list[tf.Tensor]:
        """The gradient of the global loss for each connected variable."""
        divisors = [None, *sums.weights] if self.forward.has_divided else sums.weights
        gradients = []
        for i, terms in zip(
            self.forward.connected, zip(*sums.gradients, strict=True), strict=True
        ):
            quotients = [_quotient(*pair) for pair in zip(terms, divisors, strict=True)]
            dtype = self.prepared.trainable[i].dtype
            gradients.append(tf.cast(tf.add_n(quotients), dtype))
        return gradients

    def _look_ups(self, weights: list[tf.Tensor]) -> list[Any]:
        """The gradients of look-ups, divided by the weight of their part of the loss.

        Those that travel as rows only to save bytes are added up.
        """
        found = []
        for i, (slices, total) in self.forward.look_ups.items():
            values = _quotient(slices.values, [None, *weights][total])
            values = tf.cast(values, self.prepared.trainable[i].dtype)
            slices = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
            as_table = not self.forward.plan.gather_look_ups
            found.append(tf.convert_to_tensor(slices) if as_table else slices)
        return found

    def _apply(self, gradients: list[tf.Tensor], sums: Sums) -> None:
        """Keras' optimizer."""
        forward, variables = self.forward, self.prepared.trainable
        partition = self.prepared.partition
        if partition is not None:
            whole = self.virtual is not None
            apply = partition.apply_whole if whole else partition.apply
            apply(gradients, forward.connected)
            return
        # A maximum over pieces of the batch: of one piece, and of all its rows.
        new = [
            tf.cast(tf.reduce_max(pieces, axis=0), tf.float32)
            for pieces in sums.overwrites
        ]
        places = *forward.connected, *forward.look_ups, *forward.overwritten
        keras_compat.apply(
            self.optimizer,
            [*gradients, *self._look_ups(sums.weights), *new],
            [variables[i] for i in places],
            self.backend.assign,
            variables,
        )

    def _assign_state(self, weights: Weights, totals: list[tf.Tensor]) -> None:
        """What layers have assigned; see ``collective.training.step.layer_state``."""
        forward, prepared = self.forward, self.prepared
        old = [weights.state[i] for i in forward.changing]
        old += [weights.trainable[i] for i in forward.assigned]
        variables = [prepared.state[i] for i in forward.changing]
        variables += [prepared.trainable[i] for i in forward.assigned]
        self.backend.assign(
            [keras_compat.tf_variable(v) for v in variables],
            list(map(layer_state.updated, old, totals)),
        )

    def _report(self, batch: Batch, total: StepSums, span: Any) -> tf.Tensor:
        """Everything that ranks want to know of the step, as one vector."""
        loss, outputs = global_loss(total.sums)
        return self.layout.pack(
            loss,
            batch.global_rows,
            span,
            outputs,
            total.sums.metrics,
            self.attachments.flat(total.attached),
        )

    def _explain(self, error: Exception) -> Exception:
        variables = self.prepared.trainable
        paths = [variables[i].path for i in self.forward.connected]
        return explained(finite.explain(error, self.backend, paths))


def _quotient(total: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
    """A total over its weight; None where it has been divided already."""
    if weight is None:
        return total
    return tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))
