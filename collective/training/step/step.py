"""One optimizer update, the same under every backend.

    local sums -> exchange -> check that all is finite -> / global weight
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
from collective.training import keras_compat
from collective.training.input.pipeline import Batch
from collective.training.prepared import PreparedModel
from collective.training.step import finite
from collective.training.step.attachments import Attachment, Attachments, ReplicaStep
from collective.training.step.draws import explained, warn_of_draws
from collective.training.step.forward import global_loss
from collective.training.step.found import Found
from collective.training.step.inputs import StepInputs, read_weights
from collective.training.step.metric_state import MetricState
from collective.training.step.parts import Exchange, LocalSums, StepSums, Update
from collective.training.step.report import Layout
from collective.training.step.rows import without_none
from collective.training.step.update import assign_state, global_gradients
from collective.training.traced import traced
from collective.training.variables import register_outside_variables


class Step:
    """The training step of a model on a backend; ``assemble.make_step`` makes it.

    Args:
        prepared: The model, with all of its variables.
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        local_sums, exchange, update: The parts of the step.
        attachments: What else travels in the exchange.
        layout: What the numbers of a report mean.

    Raises:
        UsageError: The update cannot do what the model asks for.
        CollectiveError: In the call, on every rank, when loss or gradients are not
            finite (nothing is applied then), or when an attachment raises it.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        spec: Batch,
        local_sums: LocalSums,
        exchange: Exchange,
        update: Update,
        attachments: Sequence[Attachment],
        layout: Layout,
    ):
        self.prepared = prepared
        self.model = prepared.model
        self.optimizer = prepared.model.optimizer
        self.backend = backend
        self.local_sums = local_sums
        self.exchange = exchange
        self.update = update
        self.attachments = Attachments(attachments)
        self.layout = layout
        gathered = layout.gathered_metrics
        self._metric_state = MetricState(self.model) if gathered else None
        self._metrics: tf.Tensor = tf.zeros([0], tf.float64)
        self.begin_epoch()
        traced = local_sums.traced
        update.check(traced.found)
        register_outside_variables(prepared, backend, traced.concrete)
        if backend.rank == 0:
            warn_of_draws(self.model, traced.found.draws)
        number = tf.TensorSpec([], tf.int64)
        metrics = tf.TensorSpec([None], tf.float64)
        self._signature = without_none(spec), number, metrics
        self._runs: dict[Any, Any] = {}

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
        return self.local_sums.traced.concrete.graph

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

    def trace(self) -> None:
        """Traces the whole step, which its first call would do."""
        self._run.get_concrete_function()

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        self.update.finish()

    @property
    def _run(self) -> Any:
        """The step; traced again for another number of replicas where it has a number."""
        backend, key = self.backend, None
        if self.local_sums.counts_replicas:
            key = backend.local_replicas, backend.replicas
        if key not in self._runs:
            self._runs[key] = traced(
                self._run_replicas, input_signature=self._signature
            )
        return self._runs[key]

    def _run_replicas(self, batch: Batch, number: tf.Tensor, metrics: tf.Tensor) -> Any:
        """Inside the ``tf.function``: the report, after an update on every replica."""
        step = self.prepared.colocated(self._replica_step)
        return self.backend.run(step, (batch, number, metrics))

    def _replica_step(
        self, batch: Batch, number: tf.Tensor, metrics: tf.Tensor
    ) -> tf.Tensor:
        """The update of one replica, inside ``Backend.run``; returns the report."""
        backend, prepared = self.backend, self.prepared
        replica = tf.cast(backend.replica(), tf.int64)
        own = self.local_sums.rows(batch, replica)
        weights = read_weights(prepared)
        inputs = StepInputs(
            weights,
            own.rows,
            own.count,
            batch.global_rows,
            keras_compat.loss_scale(self.optimizer),
            number,
            replica,
            own.first,
            metrics,
        )
        this_step = ReplicaStep(number, replica, own.rows_read)
        attached = self.attachments.contributions(this_step)

        # forward and backward pass
        sums, not_finite, found = self.local_sums(inputs)
        located = finite.at_replica(not_finite, backend)
        # sums over all replicas
        total, span = self.exchange(StepSums(sums, located, attached), found)

        # check: every write waits for it. Weight decay, the optimizer's counter and the
        # state do not depend on the gradients, and must not change without them. Every
        # write waits for every sum, too: when a rank dies, a step is whole or absent.
        checks = self._check(total, found, number)
        with tf.control_dependencies([span.stop, *checks]):
            # divide by the global weight
            gradients, indices = global_gradients(total.sums, found, prepared)
            # what layers assign: the update then changes that
            assign_state(total.sums.state, found, prepared, weights, backend)
            found.seeds.advance(backend.assign)
            # un-scale, clip, weight decay, update, constraints, average
            self.update.apply(gradients, indices)
        return self._report(batch, total, span)

    def _check(
        self, total: StepSums, found: Found, number: tf.Tensor
    ) -> list[tf.Operation]:
        """A LossScaleOptimizer expects overflows, and skips the update itself."""
        if keras_compat.expects_overflow(self.optimizer):
            return []
        checks = finite.check(total.not_finite, number, self.backend)
        if self.backend.rounds_to is not None:
            checks += finite.check_transport(
                *(total.sums.gradients, found.connected, total.not_finite, number)
            )
        return checks

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

    @property
    def paths(self) -> list[str]:
        """Of the variables, in the order in which ``finite`` numbers them."""
        return [variable.path for variable in self.prepared.trainable]

    def _explain(self, error: Exception) -> Exception:
        return explained(finite.explain(error, self.backend, self.paths))
