"""Local sums with collectives in the forward pass; see ``LocalSums``."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from collective.backends.base import Backend
from collective.tensorflow_ops.xla import compiled_around_collectives
from collective.training.input.pipeline import Batch
from collective.training.step import finite
from collective.training.step.forward import Forward, Sums
from collective.training.step.found import Found
from collective.training.step.inputs import ReplicaRows, StepInputs, replica_rows
from collective.training.step.local_sums import trace_training
from collective.training.step.metric_state import MetricState
from collective.training.step.parts import ReplicaSums
from collective.training.step.rows import Rows
from collective.training.variants.coupled import batch_norm
from collective.training.variants.coupled.forward import CoupledForward
from collective.training.variants.coupled.replica import ReplicaContext, for_replica

#: Makes the pass for a replica, and the values that metrics continue from.
MakeForward = Callable[[ReplicaContext, list[tf.Tensor] | None], CoupledForward]


class CoupledSums:
    """Sums over all rows of a replica at once, with collectives.

    Args:
        alone: A pass without collectives, to find out about the model before the step is
            traced.
        make: Makes the pass.
        metrics: Values of metrics that continue; None where all count from zero.
        sync_batch_norm: Whether every layer of batch normalization has the statistics
            of the whole global batch; otherwise those with ``synchronized=True`` do.
    """

    counts_replicas = True

    def __init__(
        self,
        backend: Backend,
        alone: Forward,
        make: MakeForward,
        spec: Batch,
        *,
        metrics: MetricState | None,
        sync_batch_norm: bool,
        maybe_empty: bool,
        jit_compile: bool,
    ):
        self.backend = backend
        self.make = make
        self.metrics = metrics
        self.sync_batch_norm = sync_batch_norm
        self.maybe_empty = maybe_empty
        self.jit_compile = jit_compile
        self.traced = trace_training(alone, spec)

    def rows(self, batch: Batch, replica: tf.Tensor) -> ReplicaRows:
        """The rows of a replica."""
        return replica_rows(self.backend, batch, replica)

    def __call__(self, inputs: StepInputs) -> ReplicaSums:
        """Inside ``Backend.run``: the sums of this replica."""
        values = self.metrics.unpack(inputs.metrics) if self.metrics else None

        def run(replica: ReplicaContext, rows: Rows) -> tuple[Sums, Found]:
            train = self.make(replica, values).train
            if self.jit_compile:
                train = compiled_around_collectives(train)
            return train(*inputs.of_pass(rows))

        with batch_norm.synchronized(self.sync_batch_norm):
            sums, found = for_replica(
                run,
                *(self.backend, inputs.rows, inputs.count, inputs.global_rows),
                maybe_empty=self.maybe_empty,
            )
        not_finite = finite.first_of(sums, found, len(inputs.weights.trainable))
        return ReplicaSums(sums, not_finite, found)
