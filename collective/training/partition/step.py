"""One step of a training: Keras' own ``train_step``, for the rows of this process.

All variables have the same values on every rank before and after. ``method`` has how the
method is partitioned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.pipeline import Batch
from collective.training.parallel import equal
from collective.training.partition.exchange import TimedExchange
from collective.training.partition.method import PartitionedMethod
from collective.training.partition.report import ReturnedLayout
from collective.training.prepared import PreparedModel
from collective.training.step import finite
from collective.training.step.attachments import Attachment, Attachments, ReplicaStep
from collective.training.step.inputs import replica_rows
from collective.training.step.rows import Rows, without_none
from collective.training.traced import traced
from collective.training.variables import (
    all_variables,
    captured_variables,
    register_outside_variables,
)
from collective.training.variants.custom_step import undo
from collective.training.variants.custom_step.building import packed
from collective.training.variants.custom_step.local_step import flat_logs


class PartitionedStep:
    """The step of a model on a backend; the interface of ``loop.TrainingStep``.

    Args:
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        method: ``train_step``, or ``test_step`` to evaluate.
        attachments: What else travels in the first sum.
        expected_rows: How many rows a batch mostly has.
        micro_batches: Into how many pieces this process cuts its rows, to save memory.
        seed: Random layers follow from it; None: from the states of their generators.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        spec: Batch,
        *,
        method: str = "train_step",
        attachments: Sequence[Attachment] = (),
        expected_rows: int | None = None,
        micro_batches: int = 1,
        seed: int | None = None,
    ):
        self.model: keras.Model = prepared.model
        self.backend = backend
        self.attachments = Attachments(attachments)
        self._name, self._is_explained = method, False
        self._expects_overflow = keras_compat.expects_overflow(self.model.optimizer)
        # By the name of a gradient's tensor: the path of its variable.
        self._gradients: dict[str, str] = {}
        self._method = PartitionedMethod(
            _with_loss(prepared, method, self._gradients),
            spec,
            expected_rows=expected_rows,
            micro_batches=micro_batches,
            fixed_rows=keras_compat.fixed_rows(self.model),
        )
        if backend.tensor is not None:
            equal.check(self._method.partition, method, prepared)
        _, logs = self._method.structure
        shapes = {name: tuple(value.shape) for name, value in logs.items()}
        self.layout = ReturnedLayout(self.model, shapes)
        self._metrics = [keras_compat.tf_variable(v) for v in self.layout.variables]
        if seed is not None:
            keras_compat.reseed(captured_variables(self.graph), seed)
        if method == "train_step":
            register_outside_variables(
                prepared, backend, self._method.source, writes=True
            )
        state = [keras_compat.tf_variable(v) for v in all_variables(self.model)]
        self._state = [*state, *self._metrics]
        signature = without_none(spec), tf.TensorSpec([], tf.int64)
        self._run = traced(self._run_replicas, input_signature=signature)

    @property
    def graph(self) -> tf.Graph:
        """The graph of the whole step, as Keras' own method made it."""
        return self._method.graph

    def __call__(self, batch: Batch, number: int) -> Any:
        """Trains on one global batch; see ``Step.__call__``."""
        self.attachments.prepare()
        args = (without_none(batch), tf.constant(number, tf.int64))
        undone: Any = contextlib.nullcontext()
        traffic = self._method.traffic
        if self.backend.elastic and (traffic.writes_early or not traffic.writes):
            # It may write before a rank dies; or was not traced yet.
            undone = undo.whole_or_absent(self._state)
        with undone:
            report = self.backend.call(self._run, args, self._explain_error)
        if not self._is_explained:
            self._is_explained = True
            if self.backend.rank == 0:
                self._method.explain(f"{self._name} of {self.model.name!r}")
        self.attachments.receive(report, self.layout.size, number)
        return report

    def begin_epoch(self, sums: np.ndarray | None = None) -> None:
        """Metrics begin at zero, as in Keras' ``fit``, or continue."""
        self.model.reset_metrics()
        if sums is not None and sums[self.layout.ROWS]:
            self.layout.restore(sums)

    def trace(self) -> None:
        """Traces the graph of this process, which the first call would do."""
        self._run.get_concrete_function()

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        keras_compat.finish(self.model.optimizer, self.model.trainable_variables)

    @property
    def paths(self) -> list[str]:
        """What the first sum has, in the order in which ``finite`` numbers it."""
        return self._method.names_of_first_sum(self._gradients)

    def _explain_error(self, error: Exception) -> Exception:
        return finite.explain(error, self.backend, self.paths)

    def _run_replicas(self, batch: Batch, number: tf.Tensor) -> Any:
        return self.backend.run(self._replica_step, (batch, number))

    def _replica_step(self, batch: Batch, number: tf.Tensor) -> tf.Tensor:
        """The step of one replica, inside ``Backend.run``; returns the report."""
        backend = self.backend
        number_to_check = None if self._expects_overflow else number
        exchange = TimedExchange(backend, number_to_check)
        replica = tf.cast(backend.replica(), tf.int64)
        own = replica_rows(backend, batch, replica)
        this_step = ReplicaStep(number, replica, own.rows_read)
        attached = self.attachments.contributions(this_step)
        (loss, logs), sums = self._method(
            own, batch.global_rows, replica, exchange, tf.nest.flatten(attached)
        )
        with tf.control_dependencies([loss, *logs.values()]):
            metrics = [tf.identity(variable) for variable in self._metrics]
            start, stop = exchange.span()
        attached = tf.nest.pack_sequence_as(attached, sums)
        if backend.tensor is not None:
            attached = self.attachments.of_ranks(attached, backend.tensor)
        return self.layout.pack_returned(
            [loss, batch.global_rows, start, stop],
            [*metrics, *logs.values(), *self.attachments.flat(attached)],
        )


def _with_loss(prepared: PreparedModel, method: str, gradients: dict[str, str]) -> Any:
    """The method, as a function of rows that also returns the loss of the batch alone.

    Args:
        gradients: Where it notes the variable of each gradient, by the tensor's name.
    """
    model = prepared.model

    def step(x: Any, y: Any, sample_weight: Any) -> Any:
        applied: list[Any] = []
        collects = keras_compat.record_applied(applied)
        with keras_compat.loss_of_step(model) as losses, collects, prepared.placed():
            logs = getattr(model, method)(packed(Rows(x, y, sample_weight)))
        for _, _, given, variables in applied:
            for gradient, variable in zip(given, variables, strict=False):
                if isinstance(gradient, tf.Tensor):
                    gradients[gradient.name] = variable.path
        if not isinstance(logs, dict):
            raise UsageError(
                f"{method} of model {model.name!r} returned {type(logs).__name__}, not a "
                "dict",
                hint="return {m.name: m.result() for m in self.metrics}",
            )
        found = {
            name: tf.convert_to_tensor(value) for name, value in flat_logs(logs).items()
        }
        scalars = [value for value in found.values() if value.shape.rank == 0]
        loss = next(iter([*losses, *scalars[:1]]), tf.zeros([]))
        return tf.identity(loss), {n: tf.identity(v) for n, v in found.items()}

    return step
