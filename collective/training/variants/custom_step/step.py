"""One step of a model with its own ``train_step``, on any process backend.

user's train_step on this replica's rows      gradients and denominators are summed
                                              where they are used (``replica.py``)
-> all-reduce of all else that it has written
-> the same state, metrics and logs on every replica

As in Keras' ``fit``, an epoch shows the metrics' results where the names that the step
returns are theirs; else what the last step returned.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import CollectiveError
from collective.tensorflow_ops.xla import compiled_around_collectives
from collective.training import compatibility, keras_compat
from collective.training.input.pipeline import Batch
from collective.training.prepared import PreparedModel
from collective.training.step import finite, layer_state
from collective.training.step.attachments import Attachment, Attachments, ReplicaStep
from collective.training.step.clock import now
from collective.training.step.draws import explained as explained_draw
from collective.training.step.draws import warn_of_draws
from collective.training.step.report import Layout, cut
from collective.training.step.rows import at_least_one_row, without_none
from collective.training.traced import traced
from collective.training.variables import all_variables
from collective.training.variants.custom_step import undo
from collective.training.variants.custom_step.accumulation import AccumulatingStep
from collective.training.variants.custom_step.local_step import (
    LocalStep,
    Logs,
    MakeHooks,
)
from collective.training.variants.custom_step.look_ups import LookUpHooks
from collective.training.variants.custom_step.pieces import PieceStep
from collective.training.variants.custom_step.replica import OrderedSums, ReplicaHooks
from collective.training.variants.custom_step.sharded import ShardedUpdate
from collective.training.variants.custom_step.share import Share
from collective.training.variants.memory.recompute import recomputed
from collective.training.variants.virtual.pieces import VirtualReplicas


class CustomStep:
    """The step of a model with its own ``train_step``; the interface of ``Step``.

    Args:
        maybe_empty: Whether a replica may have a batch without rows.
        sync_batch_norm: As for ``Step``.
        method: ``test_step``, to evaluate by it.
        jit_compile: Whether XLA compiles it, between its sums over replicas.
        accumulate: Micro-batches that a replica cuts its rows into.
        recompute: Whether activations of layers are computed again instead of kept.
        gather_look_ups: Whether tables have the gradients of single look-ups.
        virtual: The virtual replicas that share a batch; None: the backend's replicas.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        spec: Batch,
        *,
        maybe_empty: bool = True,
        attachments: Sequence[Attachment] = (),
        sync_batch_norm: bool = False,
        method: str = "train_step",
        jit_compile: bool = False,
        accumulate: int = 1,
        recompute: bool = False,
        gather_look_ups: bool = False,
        virtual: VirtualReplicas | None = None,
    ):
        self.model = prepared.model
        self.partition = prepared.partition
        compatibility.check({"own_step"}, backend)
        self.backend = backend
        self.maybe_empty = maybe_empty
        self.attachments = Attachments(attachments)
        self.sums = OrderedSums(backend)
        step = getattr(self.model, method)
        if recompute:
            step = recomputed(step, self.model)
        if jit_compile:
            step = compiled_around_collectives(step)
        self._given_sums: list[keras.Optimizer] = []
        self.micro_batches = accumulate
        self.virtual = virtual
        call = self.model, step, self.sums
        cut: Any = {"micro_batches": accumulate, "maybe_empty": maybe_empty}
        if virtual is not None:
            self.local: LocalStep = PieceStep(*call, **cut, virtual=virtual)
        elif accumulate > 1:
            self.local = AccumulatingStep(*call, **cut)
        else:
            hooks: MakeHooks = ReplicaHooks
            if gather_look_ups:
                hooks = functools.partial(LookUpHooks, set())
            self.local = LocalStep(*call, hooks)
        self.local.inline = len(backend.local_replicas) > 1
        if self.partition is not None and method == "train_step":
            self.local.apply_by = ShardedUpdate(prepared, self.sums)
        elif self.local.inline:
            self.local.apply_by = self._apply_sums
        self.local.synchronizes = sync_batch_norm and backend.most_replicas > 1
        self._metric_variables = list(self.model.metrics_variables)
        self._metrics = self.local.metrics
        self.layout = CustomLayout(self.model, self._metric_variables, {})

        self._signature = without_none(spec), tf.TensorSpec([], tf.int64)
        self._runs: dict[Any, Any] = {}
        traced = self._traced.get_concrete_function()
        if self.local.inline:
            self.local.note_written(traced.graph)
            self.trace_again()
        state = [keras_compat.tf_variable(v) for v in all_variables(self.model)]
        undo.check_known(self.local.written, state, backend)
        self._state = [*state, *self._metrics]
        if backend.rank == 0:
            warn_of_draws(self.model, self.local.others)

    def _run_replicas(self, batch: Batch, number: tf.Tensor) -> Any:
        try:
            return self.backend.run(self._replica_step, (batch, number))
        finally:
            while self._given_sums:
                keras_compat.switch_on_gradient_sum(self._given_sums.pop())

    @property
    def _traced(self) -> Any:
        """The step; traced again for another number of replicas where it has a number."""
        key = None
        if self.local.synchronizes or self.virtual is not None:
            key = self.backend.local_replicas, self.backend.replicas
        if key not in self._runs:
            self._runs[key] = traced(
                self._run_replicas, input_signature=self._signature
            )
        return self._runs[key]

    def __call__(self, batch: Batch, number: int) -> Any:
        """Trains on one global batch; see ``Step.__call__``."""
        self.attachments.prepare()
        args = (without_none(batch), tf.constant(number, tf.int64))
        undone: Any = contextlib.nullcontext()
        if self.backend.elastic:
            undone = undo.whole_or_absent(self._state)
        with undone:
            run = self._run_replicas if self.model.run_eagerly else self._traced
            report = self.backend.call(run, args, self._explain)
        self.attachments.receive(report, self.layout.size, number)
        return report

    @property
    def counts(self) -> Mapping[str, int]:
        """How many numbers of each kind the step has, as it was traced."""
        return self._counts

    def try_on(self, batch: Batch) -> dict[str, Any]:
        """Makes a step eagerly, without attachments and shards; for ``check_step``."""
        args = (batch, tf.constant(0, tf.int64))
        with (
            mock.patch.object(self, "attachments", Attachments()),
            mock.patch.object(self.local, "synchronizes", False),
            mock.patch.object(
                self.local, "apply_by", self._apply_sums if self.local.inline else None
            ),
        ):
            report = self._run_replicas(*args)
        return self.layout.returned(report.numpy())

    def trace_again(self) -> None:
        """After the check has found what is a sum over rows."""
        self._runs.clear()
        self._traced.get_concrete_function()

    def begin_epoch(self, sums: np.ndarray | None = None) -> None:
        """Metrics begin at zero, as in Keras' ``fit``."""
        self.model.reset_metrics()
        if sums is not None and sums[self.layout.ROWS]:
            values = self.layout.metric_values(sums)
            values = [
                tf.cast(v, m.dtype) for v, m in zip(values, self._metrics, strict=True)
            ]
            self.backend.run(lambda: self.backend.assign(self._metrics, values), ())

    def trace(self) -> None:
        """The step was traced when it was made."""

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        if self.partition is not None:
            self.partition.finish()
        else:
            optimizer, variables = self.model.optimizer, self.model.trainable_variables
            keras_compat.finish(optimizer, variables)

    def _replica_step(self, batch: Batch, number: tf.Tensor) -> tf.Tensor:
        """The step of one replica, inside ``Backend.run``; returns the report."""
        replica = tf.cast(self.backend.replica(), tf.int64)
        own = self.local.rows(batch, replica)
        share = Share(own.count, batch.global_rows, number, replica, own.first)
        rows = at_least_one_row(own.rows, own.count) if self.maybe_empty else own.rows
        this_step = ReplicaStep(number, replica, own.rows_read)
        attached = self.attachments.contributions(this_step)
        call = self.local.trace(rows, share)
        if not tf.executing_eagerly():
            self._counts = self.local.additive.counts
        state = self.local.state
        before = [tf.identity(v) for v in [*state, *self._metrics]]
        with tf.control_dependencies(tf.nest.flatten([before, attached])):
            rows = tf.nest.map_structure(tf.identity, rows)
        start = now()
        logs, sums = self.local.contribution(call, rows, share, before)
        wide = [[tf.cast(t, tf.float64) for t in tensors] for tensors in attached]
        totals = self.local.totals(sums, wide)
        (states, metrics, values), attached = totals
        with tf.control_dependencies(tf.nest.flatten(totals)):
            stop = now()
        if not self.local.is_whole:
            changes = [*states, *metrics]
            new = [layer_state.updated(*v) for v in zip(before, changes, strict=True)]
            self.backend.assign([*state, *self._metrics], new)
        logs = {name: values.get(name, logs[name]) for name in logs}
        return self._report(batch, logs, metrics, attached, (start, stop))

    def _apply_sums(
        self, optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Any
    ) -> None:
        """In place of ``optimizer.apply``, which sums over the replicas of a process."""
        self._given_sums.append(optimizer)
        keras_compat.switch_off_gradient_sum(optimizer)
        trainable = self.model.trainable_variables
        keras_compat.apply(
            optimizer, gradients, variables, self.backend.assign, trainable
        )

    def _report(
        self,
        batch: Batch,
        logs: Logs,
        metrics: list[tf.Tensor],
        attached: list[list[tf.Tensor]],
        span: tuple[Any, Any],
    ) -> tf.Tensor:
        values = {}
        for name, value in logs.items():
            source = self.local.sources[name]
            if source is not None:  # its variables have the totals now
                value = source.part(source.metric.result())
            values[name] = tf.cast(value, tf.float64)
        shapes = {n: tuple(v.shape) for n, v in values.items()}
        self.layout = CustomLayout(self.model, self._metric_variables, shapes)
        fixed = [self._loss(values, metrics), batch.global_rows, *span]
        rest = [*metrics, *values.values(), *self.attachments.flat(attached)]
        pieces = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in [*fixed, *rest]]
        return tf.concat(pieces, axis=0)

    def _loss(self, values: Logs, metrics: list[tf.Tensor]) -> tf.Tensor:
        """The loss of this step: ``loss``, or the first number that is returned."""
        scalars = [n for n, v in values.items() if v.shape.rank == 0]
        if not scalars:
            return tf.zeros([], tf.float64)
        name = "loss" if "loss" in scalars else scalars[0]
        source = self.local.sources[name]
        if source is None:
            return values[name]
        of_step = keras_compat.result_of(source.metric, self._metric_variables, metrics)
        return tf.cast(source.part(of_step), tf.float64)

    @property
    def paths(self) -> list[str]:
        """Of the variables, in the order in which ``finite`` numbers them."""
        return self.local.paths

    def _explain(self, error: Exception) -> Exception:
        explained = finite.explain(error, self.backend, self.paths)
        explained = explained_draw(explained)
        stays = not self.backend.elastic  # else it is put back
        if stays and isinstance(explained, CollectiveError) and explained is not error:
            explained.message = explained.message.replace(
                "No rank applied the step.",
                "No rank applied these gradients; what the train_step applied before "
                "them stays applied.",
            )
        return explained


class CustomLayout(Layout):
    """Layout of a report: loss, rows, times, changes of metrics, logs, attachments.

    Args:
        returned: The shape of each value that the step returns, by name.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Sequence[keras.Variable],
        returned: Mapping[str, tuple[int, ...]],
    ):
        self.model = model
        self.variables = list(variables)
        self.outputs = []
        self.gathered_metrics = False
        self.names = list(returned)
        self.shapes = list(returned.values())
        self.metric_shapes = [tuple(v.shape) for v in variables]
        sizes = [int(np.prod(s)) for s in [*self.metric_shapes, *self.shapes]]
        self.size = self.FIXED + sum(sizes)

    def metric_values(self, sums: np.ndarray) -> list[np.ndarray]:
        """The changes of the metrics' variables in a report, or in a sum of reports."""
        return self._values(sums)[: len(self.metric_shapes)]

    def write(self, sums: np.ndarray) -> None:
        """Nothing: the step itself updates the metrics."""

    def returned(self, report: np.ndarray) -> dict[str, np.ndarray]:
        """What the step of a report returned."""
        values = self._values(report)[len(self.metric_shapes) :]
        return dict(zip(self.names, values, strict=True))

    def _values(self, report: np.ndarray) -> list[np.ndarray]:
        return cut(report[self.FIXED :], [*self.metric_shapes, *self.shapes])

    def logs(self, sums: np.ndarray, reports: Sequence[np.ndarray]) -> dict[str, Any]:
        """What Keras would show after these steps."""
        results = keras_compat.all_results(
            self.model, self.variables, self.metric_values(sums)
        )
        if set(results) == set(self.names):
            return results
        if not reports:  # resumed behind the last step
            return {}
        last = self.returned(reports[-1])
        return {name: float(v) if v.ndim == 0 else v for name, v in last.items()}
