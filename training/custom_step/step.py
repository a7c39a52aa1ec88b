"""One step of a model with its own ``train_step``, on any process backend.

user's train_step on this replica's rows      gradients and denominators are summed
                                              where they are used (``replica.py``)
-> all-reduce of all else that it has written
-> the same state, metrics and logs on every replica
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import CollectiveError
from collective.training import keras_compat
from collective.training.checks import finite
from collective.training.coupled.replica import at_least_one_row
from collective.training.custom_step.building import check_options
from collective.training.custom_step.layout import CustomLayout
from collective.training.custom_step.local import LocalStep, Logs
from collective.training.custom_step.replica import OrderedSums, Share
from collective.training.input.pipeline import Batch
from collective.training.prepared import PreparedModel
from collective.training.replica.attachments import Attachment, ReplicaStep, Total
from collective.training.replica.inputs import replica_rows
from collective.training.replica.rows import without_none


class CustomStep:
    """The step of a model with its own ``train_step``; the interface of ``Step``.

    Args:
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        accumulate, jit_compile, recompute: Refused, unless off.
        maybe_empty: Whether a replica may have a batch without rows.
        method: ``test_step``, to evaluate by it.
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
        method: str = "train_step",
    ):
        self.model = prepared.model
        check_options(
            self.model,
            backend,
            accumulate=accumulate,
            jit_compile=jit_compile,
            recompute=recompute,
        )
        self.backend = backend
        self.maybe_empty = maybe_empty
        self.attachments = list(attachments)
        self.sums = OrderedSums(backend)
        self.local = LocalStep(self.model, getattr(self.model, method), self.sums, seed)
        self._attached_sizes: list[int] = []
        self._metric_variables = list(self.model.metrics_variables)
        self._metrics = [keras_compat.tf_variable(v) for v in self._metric_variables]
        self.layout = CustomLayout(self.model, self._metric_variables, {})

        def eager(batch: Batch, number: tf.Tensor) -> Any:
            return backend.run(self._replica_step, (batch, number))

        traced = tf.function(
            eager,
            input_signature=(without_none(spec), tf.TensorSpec([], tf.int64)),
            autograph=False,
        )
        traced.get_concrete_function()
        self._run = eager if self.model.run_eagerly else traced

    def __call__(self, batch: Batch, number: int) -> Any:
        """Trains on one global batch; see ``Step.__call__``."""
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

    def try_on(self, batch: Batch) -> dict[str, Any]:
        """Makes a step eagerly, without attachments; for ``check_step``."""
        attachments, self.attachments = self.attachments, []
        sizes = self._attached_sizes
        try:
            args = (batch, tf.constant(0, tf.int64))
            report = self.backend.run(self._replica_step, args)
        finally:
            self.attachments, self._attached_sizes = attachments, sizes
        return self.layout.returned(report.numpy())

    def begin_epoch(self, sums: np.ndarray | None = None) -> None:
        """Metrics begin at zero, as in Keras' ``fit``."""
        self.model.reset_metrics()
        if sums is not None and sums[self.layout.ROWS]:
            values = self.layout.metric_values(sums)
            for variable, value in zip(self._metric_variables, values, strict=True):
                variable.assign(value)

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        keras_compat.finish(self.model.optimizer, self.model.trainable_variables)

    def _replica_step(self, batch: Batch, number: tf.Tensor) -> tf.Tensor:
        """The step of one replica, inside ``Backend.run``; returns the report."""
        replica = tf.cast(self.backend.replica(), tf.int64)
        own = replica_rows(self.backend, batch, replica)
        share = Share(own.count, batch.global_rows, number, replica)
        rows = at_least_one_row(own.rows, own.count) if self.maybe_empty else own.rows
        this_step = ReplicaStep(number, replica, own.rows_read)
        attached = [a.contribution(this_step) for a in self.attachments]
        call = self.local.trace(rows, share)
        state = self.local.state
        before = [tf.identity(v) for v in [*state, *self._metrics]]
        with tf.control_dependencies(tf.nest.flatten([before, attached])):
            rows = tf.nest.map_structure(tf.identity, rows)
        start = tf.timestamp()
        logs = call(rows, share)
        after = [tf.identity(v) for v in [*state, *self._metrics]]

        changes = [_difference(a, b) for a, b in zip(after, before, strict=True)]
        states, metrics = changes[: len(state)], changes[len(state) :]
        local = [
            [share.of(change) for change in states],
            [share.if_any(change) for change in metrics],
            {
                n: share.of(v, tf.float64)
                for n, v in logs.items()
                if not self._metric(n)
            },
            [[tf.cast(t, tf.float64) for t in tensors] for tensors in attached],
        ]
        flat = tf.nest.flatten(local)
        if self.backend.most_replicas > 1:
            flat = self.sums(flat)
        states, metrics, values, attached = tf.nest.pack_sequence_as(local, flat)
        with tf.control_dependencies(flat):
            stop = tf.timestamp()
        if self.backend.most_replicas > 1:
            self._assign([*state, *self._metrics], before, [*states, *metrics])
        logs = {name: values.get(name, logs[name]) for name in logs}
        return self._report(batch, logs, metrics, attached, (start, stop))

    def _assign(
        self, variables: list[Any], before: list[Any], changes: list[Any]
    ) -> None:
        self.backend.assign(
            variables,
            [
                _changed(old, change)
                for old, change in zip(before, changes, strict=True)
            ],
        )

    def _metric(self, name: str) -> bool:
        return self.local.sources[name] is not None

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
                value = source.metric.result()
                value = value if source.key is None else value[source.key]
            values[name] = tf.cast(value, tf.float64)
        shapes = {n: tuple(v.shape) for n, v in values.items()}
        self.layout = CustomLayout(self.model, self._metric_variables, shapes)
        self._attached_sizes = [
            sum(t.shape.num_elements() for t in tensors) for tensors in attached
        ]
        fixed = [self._loss(values, metrics), batch.global_rows, *span]
        rest = [*metrics, *values.values(), *tf.nest.flatten(attached)]
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
        of_step = of_step if source.key is None else of_step[source.key]
        return tf.cast(of_step, tf.float64)

    def _explain(self, error: Exception) -> Exception:
        explained = finite.explain(error, self.backend, self.local.paths)
        if isinstance(explained, CollectiveError) and explained is not error:
            explained.message = explained.message.replace(
                "No rank applied the step.",
                "No rank applied these gradients; what the train_step applied before "
                "them stays applied.",
            )
        return explained


def _difference(after: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    return tf.cast(after, tf.float64) - tf.cast(before, tf.float64)


def _changed(before: tf.Tensor, change: tf.Tensor) -> tf.Tensor:
    after = tf.cast(before, tf.float64) + change
    if before.dtype.is_floating:
        return tf.cast(after, before.dtype)
    return tf.cast(tf.round(after), before.dtype)
