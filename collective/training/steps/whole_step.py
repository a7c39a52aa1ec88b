"""Keras' own methods on whole batches, on every rank, for a model that runs eagerly.

With ``run_eagerly=True`` there is no graph that could be partitioned. So every rank gathers
the rows of all ranks, and does with them what one process does, with the random numbers of
rank 0. On GPUs, where the last bits of sums may differ, it also takes rank 0's gradients.
Each rank needs the memory and the time of the whole batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.log import log
from collective.tensorflow_ops.repeated_rows import added_once
from collective.training import keras_compat
from collective.training.input.pipeline import Batch
from collective.training.keras_compat.traced import traced
from collective.training.model.prepared import PreparedModel
from collective.training.partition import composites
from collective.training.partition.exchange import BackendExchange
from collective.training.process import host_random
from collective.training.process.object_collectives import broadcast_object
from collective.training.step import finite
from collective.training.step.attachments import Attachment, Attachments, ReplicaStep
from collective.training.step.inputs import replica_rows
from collective.training.step.report_layout import Layout
from collective.training.step.rows import BatchRows, without_none
from collective.training.steps.partitioned_step import with_loss

_said: WeakSet[keras.Model] = WeakSet()


class WholeRows:
    """The rows of all ranks, on every rank.

    Args:
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        attachments: Further values that are summed over the ranks.
    """

    def __init__(self, backend: Backend, spec: Batch, attachments: Attachments):
        self.backend, self.attachments = backend, attachments
        self._signature = without_none(spec), tf.TensorSpec([], tf.int64)
        self._run: Any = None

    def __call__(
        self, batch: Batch, number: int
    ) -> tuple[BatchRows, Any, list[tf.Tensor]]:
        """Return the batch's rows, the first and number of this rank's, attached sums."""
        args = (without_none(batch), tf.constant(number, tf.int64))
        if self._run is None:  # it stays a graph even if all functions run eagerly
            run = traced(self._run_replicas, input_signature=self._signature)
            self._run = run.get_concrete_function()
        rows, place, sums = self.backend.call(self._run, args)
        return rows, place, sums

    def _run_replicas(self, batch: Batch, number: tf.Tensor) -> Any:
        return self.backend.run(self._gathered, (batch, number))

    def _gathered(self, batch: Batch, number: tf.Tensor) -> Any:
        """Gather the rows inside ``Backend.run``."""
        backend, exchange = self.backend, BackendExchange(self.backend)
        replica = tf.cast(backend.replica(), tf.int64)
        own = replica_rows(backend, batch, replica)
        this_step = ReplicaStep(number, replica, own.rows_read)
        attached = self.attachments.contributions(this_step)
        parts = [exchange.added("sum", [t]) for t in tf.nest.flatten(attached)]
        sums = exchange.reduce("sum", parts)
        before: list[tf.Tensor] = sums[-1:]

        def whole(leaf: Any) -> Any:
            with tf.control_dependencies(before):  # in the same order on every rank
                if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
                    found = composites.gathered(
                        leaf, own.first, batch.global_rows, exchange
                    )
                else:
                    found = exchange.gather(leaf)
            before[:] = tf.nest.flatten(found, expand_composites=True)
            return found

        rows = tf.nest.map_structure(whole, own.rows)
        totals = self.attachments.flat(tf.nest.pack_sequence_as(attached, sums))
        return rows, (own.first, tf.cast(own.count, tf.int64)), totals


class WholeLayout(Layout):
    """Layout of a report without the values that the step returns when it has run."""

    def __init__(self, model: keras.Model):
        super().__init__(model, {})
        self.last: dict[str, tf.Tensor] = {}  # the values that the last step returned

    def logs(self, report: np.ndarray) -> dict[str, Any]:
        """Return the values that Keras shows after the last step."""
        return self.shown(self.last)


class WholeStep:
    """The step of a model that runs eagerly; the interface of ``loop.TrainingStep``.

    Args:
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        method: ``train_step``, or ``test_step`` to evaluate.
        attachments: Further values that are summed over the ranks.
        micro_batches: The wanted number of pieces; here they cannot save memory.
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
        micro_batches: int = 1,
        seed: int | None = None,
    ):
        self.model: keras.Model = prepared.model
        self.backend = backend
        self.attachments = Attachments(attachments)
        self.layout = WholeLayout(self.model)
        self.paths: list[str] = []
        self._rows = WholeRows(backend, spec, self.attachments)
        self._method = with_loss(prepared, method)
        if seed is not None:
            states = keras_compat.seeds.seed_states(self.model)
            keras_compat.seeds.reseed(
                [keras_compat.model.tf_variable(v) for v in states], seed
            )
        say(self.model, backend, micro_batches)

    def __call__(self, batch: Batch, number: int) -> Any:
        """Train on one global batch; see ``TrainingStep.__call__``."""
        self.attachments.prepare()
        begin = time.time()
        rows, _, sums = self._rows(batch, number)
        end = time.time()
        checks = keras_compat.tracing.applied_by(self._checked(number))
        with as_rank_zero(self.backend), checks:
            loss, logs = self._method(*rows)
        self.layout.last = logs
        metrics = [keras_compat.model.tf_variable(v) for v in self.layout.variables]
        report = self.layout.pack(
            [loss, batch.global_rows, begin, end], [*metrics, *sums]
        )
        self.attachments.receive(report, self.layout.size, number)
        return report

    def _checked(self, number: int) -> Callable[..., Any]:
        """Return a function that checks that gradients are finite, and applies them."""

        def apply(
            optimizer: keras.Optimizer, gradients: Sequence[Any], variables: Any
        ) -> Any:
            if not keras_compat.optimizers.expects_overflow(optimizer):
                pairs = zip(gradients, variables, strict=False)
                known = [(g, v.path) for g, v in pairs if g is not None]
                self.paths[:] = [path for _, path in known]
                place = finite.first([tf.convert_to_tensor(g) for g, _ in known])
                finite.check_now(int(place), number, self.backend, self.paths)
            return optimizer.apply(self._of_rank_zero(gradients), variables)

        return apply

    def _of_rank_zero(self, gradients: Sequence[Any]) -> Sequence[Any]:
        if self.backend.size == 1:
            return gradients
        return gradients_of_rank_zero(self.backend, gradients)

    def begin_epoch(self, last: np.ndarray | None = None) -> None:
        """Set metrics to zero, as Keras' ``fit`` does, or to their values in a report."""
        self.layout.begin_epoch(last)

    def overrun(self) -> None:
        """Do nothing; see ``PartitionedStep.overrun``."""

    def trace(self) -> None:
        """Do nothing, because the step is not traced."""

    def finish(self) -> None:
        """Do what Keras does at the end of ``fit``; every rank calls it."""
        keras_compat.optimizers.finish(
            self.model.optimizer, self.model.trainable_variables
        )


class WholePrediction:
    """The predictions of a model that runs eagerly for the rows of this rank.

    Args:
        predict_step: The model's method, as a function of ``x, y, sample_weight``.
    """

    def __init__(self, predict_step: Callable[..., Any], backend: Backend, spec: Batch):
        self.backend, self._step = backend, predict_step
        self._rows = WholeRows(backend, spec, Attachments())

    def __call__(self, batch: Batch) -> Any:
        """Return this rank's rows of the outputs; outputs that are not by rows, whole."""
        rows, (first, count), _ = self._rows(batch, 0)
        with as_rank_zero(self.backend):
            outputs = self._step(*rows)
        total = int(batch.global_rows)

        def own(leaf: Any) -> Any:
            if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
                return composites.rows_of(leaf, first, count)
            by_rows = len(leaf.shape) > 0 and leaf.shape[0] == total
            return leaf[int(first) : int(first + count)] if by_rows else leaf

        return tf.nest.map_structure(own, outputs)


@contextlib.contextmanager
def as_rank_zero(backend: Backend) -> Iterator[None]:
    """Have every rank draw the numbers that rank 0 draws."""
    if backend.size > 1:
        state = keras_compat.eager_draws.eager_draws(), host_random.state()
        eager, host = broadcast_object(backend, state)
        if backend.rank:
            keras_compat.eager_draws.set_eager_draws(eager)
            if (
                not host_random.is_read()
            ):  # else data may be drawing numbers of their own
                host_random.set_state(host)
    yield


def gradients_of_rank_zero(backend: Backend, gradients: Sequence[Any]) -> Sequence[Any]:
    """Return rank 0's gradients if GPUs may add them up in different orders.

    Rows that occur several times are added up first, because the optimizer would add them
    up in different orders, too.
    """
    gradients = [
        tf.IndexedSlices(*reversed(added_once(g.indices, g.values)), g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else g
        for g in gradients
    ]
    if not tf.config.list_logical_devices("GPU"):
        return gradients
    tensors = tf.nest.flatten(list(gradients), expand_composites=True)
    arrays = [None if t is None else tf.convert_to_tensor(t).numpy() for t in tensors]
    sent = [
        None if array is None else tf.constant(array)
        for array in broadcast_object(backend, arrays)
    ]
    return tf.nest.pack_sequence_as(list(gradients), sent, expand_composites=True)


def say(model: keras.Model, backend: Backend, micro_batches: int = 1) -> None:
    """Warn once that the step saves no memory."""
    if micro_batches > 1 and backend.rank == 0:
        log.warning(
            "model %r has run_eagerly=True: accumulate=%d saves no memory",
            model.name,
            micro_batches,
        )
    if backend.replicas > 1 and backend.rank == 0 and model not in _said:
        _said.add(model)
        log.warning(
            "model %r has run_eagerly=True: there is no graph to share out, so each of "
            "%d ranks computes whole batches, with the memory and in the time that one "
            "process takes",
            model.name,
            backend.replicas,
        )
