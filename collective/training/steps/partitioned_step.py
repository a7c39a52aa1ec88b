"""One step of a training: Keras' own ``train_step``, for the rows of this process.

All variables have the same values on every rank before and after it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.compression.compressed_exchange import HookExchange
from collective.training.input.pipeline import Batch
from collective.training.input.plan import share
from collective.training.keras_compat.traced import traced
from collective.training.model.prepared import PreparedModel
from collective.training.model.variables import (
    all_variables,
    captured_variables,
    register_outside_variables,
)
from collective.training.parallel import equal
from collective.training.partition import devices
from collective.training.partition.method import PartitionedMethod
from collective.training.partition.undo import whole_or_absent
from collective.training.sharding import held
from collective.training.step import finite
from collective.training.step.attachments import Attachment, Attachments, ReplicaStep
from collective.training.step.inputs import ReplicaRows, process_rows
from collective.training.step.report_layout import Layout, flat_logs
from collective.training.step.rows import BatchRows, packed, without_none
from collective.training.steps import mesh
from collective.training.virtual.pieces import VirtualReplicas


class PartitionedStep:
    """The step of a model on a backend; the interface of ``loop.TrainingStep``.

    Args:
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        method: ``train_step``, or ``test_step`` to evaluate.
        attachments: Further values that travel in the first sum.
        expected_rows: The number of rows that most batches have.
        micro_batches: The number of pieces into which this process cuts its rows, to save
            memory.
        seed: Determines the random layers. If None, the states of their generators do.
        virtual: The virtual replicas that share a batch. If None, the backend's replicas.
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
        virtual: VirtualReplicas | None = None,
    ):
        self.model: keras.Model = prepared.model
        self.backend, self.virtual = backend, virtual
        self.attachments = Attachments(attachments)
        self._name, self._is_explained = method, False
        self._expects_overflow = keras_compat.optimizers.expects_overflow(
            self.model.optimizer
        )
        self._method = PartitionedMethod(
            with_loss(prepared, method),
            spec,
            expected_rows=expected_rows,
            micro_batches=micro_batches,
            fixed_rows=keras_compat.model.fixed_rows(self.model),
            whole_gradients=bool(backend.rounds_to or prepared.hook),
            placed=mesh.in_pieces,
            tracing=self._tracing(),
        )
        # The state that a communication hook keeps between steps.
        self._hook = prepared.hook if method == "train_step" else None
        if self._hook is not None:
            self._hook.check(self._method.gradients)
        if backend.tensor is not None:
            equal.check(self._method.partition, method, prepared)
        _, logs = self._method.structure
        shapes = {name: tuple(value.shape) for name, value in logs.items()}
        self.layout = Layout(self.model, shapes)
        self._metrics = [
            keras_compat.model.tf_variable(v) for v in self.layout.variables
        ]
        self._begin(prepared, seed)
        state = [keras_compat.model.tf_variable(v) for v in all_variables(self.model)]
        self._state = [*state, *self._metrics]
        if self._hook is not None:
            self._state += self._hook.variables
        self._signature = without_none(spec), tf.TensorSpec([], tf.int64)
        self._runs: dict[Any, Any] = {}

    def _begin(self, prepared: PreparedModel, seed: int | None) -> None:
        if seed is not None:
            keras_compat.seeds.reseed(captured_variables(self.graph), seed)
        if self._name == "train_step":
            register_outside_variables(
                prepared, self.backend, self._method.source, writes=True
            )

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Trace the method, whose variables may be held in parts."""
        with devices.on_first(self.model, self.backend), held.tracing():
            yield

    def continue_with(
        self,
        prepared: PreparedModel,
        attachments: Sequence[Attachment],
        seed: int | None,
    ) -> bool:
        """Prepare this step of an earlier training for another one; False if impossible."""
        found = self.attachments.continued_by(attachments)
        if found is None:
            return False
        self.attachments = found
        self._begin(prepared, seed)
        return True

    @property
    def graph(self) -> tf.Graph:
        """Return the graph of the whole step, as Keras' own method made it."""
        return self._method.graph

    def _attached(self, batch: Batch, number: tf.Tensor) -> Any:
        """Return the sum of the values that the replicas of this process attach."""
        found = []
        for replica, own in devices.rows_of_replicas(self.backend, batch):
            step = ReplicaStep(number, replica, own.rows_read)
            found.append(self.attachments.contributions(step))
        return tf.nest.map_structure(lambda *t: tf.add_n(t), *found)

    def __call__(self, batch: Batch, number: int) -> Any:
        """Train on one global batch; see ``TrainingStep.__call__``."""
        self.attachments.prepare()
        args = (without_none(batch), tf.constant(number, tf.int64))
        undone: Any = contextlib.nullcontext()
        traffic = self._method.traffic
        if self.backend.elastic and (traffic.writes_early or not traffic.writes):
            # It may write before a rank dies, or it was not traced yet.
            undone = whole_or_absent(self._state)
        with undone:
            report = self.backend.call(self._run, args, self._explain_error)
        if not self._is_explained:
            self._is_explained = True
            if self.backend.rank == 0:
                self._method.explain(f"{self._name} of {self.model.name!r}")
        self.attachments.receive(report, self.layout.size, number)
        return report

    def begin_epoch(self, last: np.ndarray | None = None) -> None:
        """Set metrics to zero, as Keras' ``fit`` does, or to their values in a report."""
        with devices.on_first(self.model, self.backend):
            self.layout.begin_epoch(last)
        keras_compat.one_copy.follow_first(self._metrics)

    def overrun(self) -> None:
        """Do what a step of Keras does before it finds that there is no batch for it.

        Keras asks for a batch within its function. If the data do not say how many batches
        there are, its last call counts a step and draws the seeds of one, although it
        trains on nothing.
        """
        if self.model.steps_per_execution == 1:
            self.backend.call(self._run_overrun, (), self._explain_error)

    @functools.cached_property
    def _run_overrun(self) -> Any:
        def overrun() -> tf.Tensor:
            exchange = devices.exchange_of(self.backend)
            with held.tracing():
                return self._method.overrun(exchange)

        return traced(overrun)

    def trace(self) -> None:
        """Trace the graph of this process, as the first call would."""
        self._run.get_concrete_function()

    def finish(self) -> None:
        """Do what Keras does at the end of ``fit``; every rank calls it."""
        keras_compat.optimizers.finish(
            self.model.optimizer, self.model.trainable_variables
        )

    @property
    def paths(self) -> list[str]:
        """Return the names of the first sum's parts, in the order of ``finite``'s numbers."""
        return self._method.names_of_first_sum()

    @property
    def _run(self) -> Any:
        """Return the function of a step, one for each set of pieces that replicas hold."""
        key = None
        if self.virtual is not None:
            key = self.backend.local_replicas, self.backend.replicas
        if key not in self._runs:
            self._runs[key] = traced(self._run_process, input_signature=self._signature)
        return self._runs[key]

    def _explain_error(self, error: Exception) -> Exception:
        return finite.explain(error, self.backend, self.paths)

    def _run_process(self, batch: Batch, number: tf.Tensor) -> tf.Tensor:
        """Run the step of this process, and return the report."""
        # An evaluation applies nothing, so its numbers are not checked, as in Keras.
        is_checked = self._name == "train_step" and not self._expects_overflow
        number_to_check = number if is_checked else None
        exchange = devices.exchange_of(self.backend, number_to_check, self.virtual)
        if self._hook is not None:
            exchange = HookExchange(self.backend, number_to_check, self._hook)
        replica, own = self._rows(batch)
        attached = self._attached(batch, number)
        with held.tracing():
            (loss, logs), sums = self._method(
                own, batch.global_rows, replica, exchange, tf.nest.flatten(attached)
            )
        with tf.control_dependencies([loss, *logs.values()]):
            metrics = [
                keras_compat.one_copy.copies(variable)[0].read_value()
                for variable in self._metrics
            ]
            start, stop = exchange.span()
            exchange.finish()
        attached = tf.nest.pack_sequence_as(attached, sums)
        return self.layout.pack(
            [loss, batch.global_rows, start, stop],
            [*metrics, *logs.values(), *self.attachments.flat(attached)],
        )

    def _rows(self, batch: Batch) -> tuple[tf.Tensor, ReplicaRows]:
        """Return the number of the first replica of this process, and all of its rows."""
        if self.virtual is None:
            return devices.rows_of_process(self.backend, batch)
        replica = tf.constant(self.backend.local_replicas[0], tf.int64)
        held, count = self.virtual.held(self.backend), self.virtual.count
        first, _ = share(batch.global_rows, held[0], count)
        return replica, process_rows(batch, first)


def with_loss(prepared: PreparedModel, method: str) -> Any:
    """Return the method as a function of rows that also returns the loss of this batch."""
    model = prepared.model
    around = prepared.trains if method == "train_step" else prepared.placed

    def step(x: Any, y: Any, sample_weight: Any) -> Any:
        with keras_compat.tracing.loss_of_step(model) as losses, around():
            logs = getattr(model, method)(packed(BatchRows(x, y, sample_weight)))
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
        # Without a reduction there is one loss for each row; Keras shows their mean.
        return tf.reduce_mean(loss), {n: tf.identity(v) for n, v in found.items()}

    return step
