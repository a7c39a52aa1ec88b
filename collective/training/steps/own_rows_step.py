"""Keras' own step on the rows of each replica, which are a batch of their own.

tf.distribute and Horovod do this with any model; here it is done if it is asked for
(``own_batches``). Gradients are averaged, weighted by rows, when an optimizer gets them, and
so are the values that the step writes and returns. Metrics count from zero in each step, and
are added up.

Workers of parameter servers have this step, too: each is the only replica of its batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.training import keras_compat
from collective.training.input.pipeline import Batch
from collective.training.input.replica_batches import first_of
from collective.training.keras_compat.traced import traced
from collective.training.model.prepared import PreparedModel
from collective.training.model.variables import (
    captured_variables,
    register_outside_variables,
    written_variables,
)
from collective.training.step import finite, layer_state
from collective.training.step.attachments import Attachment, Attachments, ReplicaStep
from collective.training.step.clock import now
from collective.training.step.inputs import replica_rows
from collective.training.step.report_layout import Layout
from collective.training.step.rows import BatchRows, at_least_one_row, without_none
from collective.training.steps.partitioned_step import with_loss


class OwnRowsStep:
    """The step of replicas with batches of their own, used like ``PartitionedStep``.

    Args:
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        method: ``train_step``, or ``test_step`` to evaluate.
        attachments: Further values that are summed over the replicas.
        is_stacked: Whether each row of ``spec`` is a whole batch, of which a replica has one.
        seed: Determines the random layers. If None, the states of their generators do.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        spec: Batch,
        *,
        method: str = "train_step",
        attachments: Sequence[Attachment] = (),
        is_stacked: bool = False,
        seed: int | None = None,
    ):
        self.model: keras.Model = prepared.model
        self.backend = backend
        self.attachments = Attachments(attachments)
        self.layout = Layout(self.model, {})
        self.paths: list[str] = []
        self._step = with_loss(prepared, method)
        self._is_stacked = is_stacked
        self._metrics = [
            keras_compat.model.tf_variable(v) for v in self.layout.variables
        ]
        self._counts_alone = method == "train_step" and not backend.synchronous
        # The ids of variables that an optimizer writes, the same on every replica.
        self._updated: set[int] = set()
        self._state: list[tf.Variable] = []  # other variables that are written
        signature = without_none(spec), tf.TensorSpec([], tf.int64)
        found = traced(self._run_replicas, input_signature=signature)
        source = found.get_concrete_function()
        known = self._updated | {id(v) for v in self._metrics}
        if backend.synchronous:  # else each worker writes by itself
            self._state = [
                v for v in written_variables(source.graph) if id(v) not in known
            ]
        if seed is not None:
            keras_compat.seeds.reseed(captured_variables(source.graph), seed)
        if method == "train_step":
            register_outside_variables(prepared, backend, source, writes=True)
        self._run = traced(self._run_replicas, input_signature=signature)

    def __call__(self, batch: Batch, number: int) -> Any:
        """Train on one global batch; see ``TrainingStep.__call__``."""
        self.attachments.prepare()
        args = (without_none(batch), tf.constant(number, tf.int64))
        report = self.backend.call(self._run, args, self._explain_error)
        self.attachments.receive(report, self.layout.size, number)
        return report

    def begin_epoch(self, last: np.ndarray | None = None) -> None:
        """Set metrics to zero, as Keras' ``fit`` does, or to their values in a report."""
        self.layout.begin_epoch(last)

    def overrun(self) -> None:
        """Do nothing; see ``PartitionedStep.overrun``."""

    def trace(self) -> None:
        """Trace the graph of this process, as the first call would."""
        self._run.get_concrete_function()

    def finish(self) -> None:
        """Do what Keras does at the end of ``fit``; every rank calls it."""
        keras_compat.optimizers.finish(
            self.model.optimizer, self.model.trainable_variables
        )

    def _explain_error(self, error: Exception) -> Exception:
        return finite.explain(error, self.backend, self.paths)

    def _run_replicas(self, batch: Batch, number: tf.Tensor) -> tf.Tensor:
        return self.backend.run(self._replica_step, (batch, number))

    def _replica_step(self, batch: Batch, number: tf.Tensor) -> tf.Tensor:
        """Run the step of one replica inside ``Backend.run``, and return the report."""
        replica = tf.cast(self.backend.replica(), tf.int64)
        own = replica_rows(self.backend, batch, replica)
        rows: BatchRows = at_least_one_row(own.rows, own.count)
        if self._is_stacked:
            rows = first_of(rows)
        attached = self.attachments.contributions(
            ReplicaStep(number, replica, own.rows_read)
        )
        share = tf.cast(own.count, tf.float64) / tf.cast(batch.global_rows, tf.float64)
        update = _Update(self, share, number)
        before = [tf.identity(variable) for variable in self._state]
        with contextlib.ExitStack() as inside:
            inside.enter_context(keras_compat.tracing.applied_by(update))
            inside.enter_context(
                keras_compat.replica_draws.draw_as_replica(self.backend.rank)
            )
            if self._counts_alone:
                optimizer = self.model.optimizer
                inside.enter_context(
                    keras_compat.optimizers.count_atomically(optimizer)
                )
            scope = inside.enter_context(
                keras_compat.tracing.counted_metrics(self.model)
            )
            loss, logs = self._step(*rows)
        after = [tf.identity(variable) for variable in self._state]
        changes = [
            layer_state.contribution(*pair, share)
            for pair in zip(before, after, strict=True)
        ]
        means = [
            _weighted(tf.cast(v, tf.float64), share) for v in [loss, *logs.values()]
        ]
        counts = [
            _weighted(tf.cast(scope.get_current_value(v), tf.float64), own.count > 0)
            for v in self.layout.variables
        ]
        flat = tf.nest.flatten(attached)
        changes, means, counts, flat = self.summed([changes, means, counts, flat])
        new = map(layer_state.updated, before, changes)
        self.backend.assign(self._state, list(new))
        metrics = self._add_to_metrics(counts)
        self.layout.describe({n: tuple(v.shape) for n, v in logs.items()})
        attached = tf.nest.pack_sequence_as(attached, flat)
        return self.layout.pack(
            [means[0], batch.global_rows, update.start, update.stop],
            [*metrics, *means[1:], *self.attachments.flat(attached)],
        )

    def _add_to_metrics(self, counts: list[tf.Tensor]) -> list[tf.Tensor]:
        """Add the counts of this step to the metrics, and return the new values."""
        pairs = [
            (v, tf.cast(c, v.dtype)) for v, c in zip(self._metrics, counts, strict=True)
        ]
        if not self.backend.synchronous:  # in one operation, because others write, too
            return [variable.assign_add(count) for variable, count in pairs]
        metrics = [variable + count for variable, count in pairs]
        self.backend.assign(self._metrics, metrics)
        return metrics

    def summed(self, tensors: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Return the sums over replicas, in float64."""
        wide = [tf.cast(t, tf.float64) for t in tf.nest.flatten(tensors)]
        sums = self.backend.all_reduce(wide) if wide else []
        found: list[list[tf.Tensor]] = tf.nest.pack_sequence_as(tensors, sums)
        return found


class _Update:
    """Has an optimizer apply the mean of all replicas' gradients in place of its own.

    Args:
        share: float64 scalar, the part of the rows that this replica has.
        number: The number of the step.
    """

    def __init__(self, step: OwnRowsStep, share: tf.Tensor, number: tf.Tensor):
        self.step, self.share, self.number = step, share, number
        self.start = self.stop = now()

    def __call__(
        self, optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Any
    ) -> Any:
        """Apply the mean; called in place of ``optimizer.apply``."""
        backend = self.step.backend
        mine = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        known = [g for g in mine if g is not None]
        pairs = zip(mine, variables, strict=False)
        self.step.paths[:] = [v.path for g, v in pairs if g is not None]
        located = finite.at_replica(finite.first(known), backend)
        with tf.control_dependencies(known):
            self.start = now()
        *sums, places = backend.all_reduce(
            [*(_weighted(g, self.share) for g in known), located], range(len(known))
        )
        with tf.control_dependencies(sums):
            self.stop = now()
        checks = []
        if not keras_compat.optimizers.expects_overflow(optimizer):
            checks = finite.check(places, self.number, backend)
        with tf.control_dependencies(checks):
            means = iter([tf.identity(total) for total in sums])
        mean = [None if g is None else next(means) for g in mine]
        result = keras_compat.optimizers.apply(optimizer, mean, variables)
        written = [*variables, *optimizer.variables]
        self.step._updated.update(
            id(keras_compat.model.tf_variable(v)) for v in written
        )
        return result


def _weighted(tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Return the product; zero if the weight is zero, even if the tensor is not finite."""
    return tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))
