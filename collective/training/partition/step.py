"""One step of a training: Keras' own ``train_step``, for the rows of this process.

The method is traced once, for batches of any length, and partitioned by their rows; see
``collective.training.partition.partition``. All variables have the same values on every
rank before and after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.training import keras_compat
from collective.training.input.pipeline import Batch
from collective.training.partition.emission import Traffic
from collective.training.partition.exchange import TimedExchange
from collective.training.partition.layouts import ROWS
from collective.training.partition.partition import Partition
from collective.training.partition.propagation import Rows
from collective.training.partition.report import ReturnedLayout
from collective.training.partition.shares import Share
from collective.training.prepared import PreparedModel
from collective.training.step.attachments import Attachment, Attachments, ReplicaStep
from collective.training.step.inputs import ReplicaRows, replica_rows
from collective.training.step.rows import Rows as RowsOfBatch
from collective.training.step.rows import rows_of, without_none
from collective.training.traced import traced
from collective.training.variables import all_variables, register_outside_variables
from collective.training.variants.custom_step import undo
from collective.training.variants.custom_step.building import packed
from collective.training.variants.custom_step.local_step import flat_logs


class PartitionedStep:
    """The step of a model on a backend; the interface of ``loop.TrainingStep``.

    Args:
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        attachments: What else travels in the first sum.
        expected_rows: How many rows a batch mostly has.
        micro_batches: Into how many pieces this process cuts its rows, to save memory.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        spec: Batch,
        *,
        attachments: Sequence[Attachment] = (),
        expected_rows: int | None = None,
        micro_batches: int = 1,
    ):
        self.model: keras.Model = prepared.model
        self.backend = backend
        self.attachments = Attachments(attachments)
        self.micro_batches = micro_batches
        self.traffic = Traffic()
        self.source = _trace(self.model, spec)
        leaves = tf.nest.flatten(tuple(rows_of(spec)))
        self.partition = Partition(
            self.source.function, [ROWS] * len(leaves), Rows.unknown(expected_rows)
        )
        self.layout = ReturnedLayout(self.model, self.source.returned)
        self._state = [keras_compat.tf_variable(v) for v in all_variables(self.model)]
        self._metrics = [keras_compat.tf_variable(v) for v in self.layout.variables]
        register_outside_variables(prepared, backend, self.source.function, writes=True)
        signature = without_none(spec), tf.TensorSpec([], tf.int64)
        self._run = traced(self._run_replicas, input_signature=signature)

    @property
    def graph(self) -> tf.Graph:
        """The graph of the whole step, as Keras' own method made it."""
        return self.source.function.graph

    def __call__(self, batch: Batch, number: int) -> Any:
        """Trains on one global batch; see ``Step.__call__``."""
        self.attachments.prepare()
        args = (without_none(batch), tf.constant(number, tf.int64))
        undone: Any = contextlib.nullcontext()
        if self.backend.elastic:
            undone = undo.whole_or_absent([*self._state, *self._metrics])
        with undone:
            report = self.backend.call(self._run, args)
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

    def _run_replicas(self, batch: Batch, number: tf.Tensor) -> Any:
        return self.backend.run(self._replica_step, (batch, number))

    def _replica_step(self, batch: Batch, number: tf.Tensor) -> tf.Tensor:
        """The step of one replica, inside ``Backend.run``; returns the report."""
        backend = self.backend
        replica = tf.cast(backend.replica(), tf.int64)
        own = replica_rows(backend, batch, replica)
        this_step = ReplicaStep(number, replica, own.rows_read)
        attached = self.attachments.contributions(this_step)
        exchange = TimedExchange(backend)
        arguments, share = self._cut(own, batch.global_rows, replica)
        outputs, sums = self.partition.emit(
            arguments,
            share,
            exchange,
            self.traffic,
            attached=tf.nest.flatten(attached),
        )
        values = {name: output[0] for name, output in zip(self.source.names, outputs)}
        loss, returned = self.source.unpack(values)
        with tf.control_dependencies([t for output in outputs for t in output]):
            metrics = [tf.identity(variable) for variable in self._metrics]
            start, stop = exchange.span()
        attached = tf.nest.pack_sequence_as(attached, sums)
        return self.layout.pack_returned(
            [loss, batch.global_rows, start, stop],
            [*metrics, *returned, *self.attachments.flat(attached)],
        )

    def _cut(
        self, own: ReplicaRows, total: tf.Tensor, replica: tf.Tensor
    ) -> tuple[list[list[tf.Tensor]], Share]:
        """The arguments for each micro-batch, and which rows they have."""
        leaves = tf.nest.flatten(tuple(own.rows))
        count, pieces = tf.cast(own.count, tf.int64), self.micro_batches
        bounds = [count * j // pieces for j in range(pieces + 1)]
        cuts = list(zip(bounds[:-1], bounds[1:], strict=True))
        arguments = [
            [leaf[begin:end] for begin, end in cuts] if pieces > 1 else [leaf]
            for leaf in leaves
        ]
        replicas = [
            (own.first + begin, end - begin, tf.equal(replica, 0) if not j else False)
            for j, (begin, end) in enumerate(cuts)
        ]
        return arguments, Share.of(total, replicas)


class _Source:
    """A method of a model, as it was traced for a whole batch.

    Attributes:
        function: The concrete function.
        returned: The shape of each value that the method returns, by name.
        names: Those of the tensors that the function returns, in order.
    """

    def __init__(self, function: Any):
        self.function = function
        self.names = [tensor.name for tensor in function.graph.outputs]
        self._loss, self._logs = function.graph.structured_outputs
        self.returned = {name: tuple(value.shape) for name, value in self._logs.items()}

    def unpack(self, values: dict[str, tf.Tensor]) -> tuple[Any, list[Any]]:
        """The loss of the step, and what the method returns, of outputs by name."""
        returned = [values[tensor.name] for tensor in self._logs.values()]
        return values[self._loss.name], returned


def _trace(model: keras.Model, spec: Batch) -> _Source:
    def step(x: Any, y: Any, sample_weight: Any) -> Any:
        with keras_compat.loss_of_step(model) as losses:
            logs = model.train_step(packed(RowsOfBatch(x, y, sample_weight)))
        found = {
            name: tf.convert_to_tensor(value) for name, value in flat_logs(logs).items()
        }
        scalars = [value for value in found.values() if value.shape.rank == 0]
        loss = next(iter([*losses, *scalars[:1]]), tf.zeros([]))
        return tf.identity(loss), {n: tf.identity(v) for n, v in found.items()}

    function = traced(step).get_concrete_function(*rows_of(spec))
    return _Source(function)


def supports(backend: Backend) -> bool:
    """Whether a backend has what a partitioned step exchanges."""
    one_each = len(backend.local_replicas) == 1 and backend.synchronous
    return one_each and (isinstance(backend, ShardCollectives) or backend.size == 1)
