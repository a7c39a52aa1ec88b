"""Loss and metrics of whole global batches, in inference mode."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.evaluation.exact import TestSums, pieces_of, warn_of_dropped
from collective.training.prepared import PreparedModel
from collective.training.step.draws import Draws
from collective.training.step.forward import Sums
from collective.training.step.found import Found
from collective.training.step.inputs import ReplicaRows, Weights
from collective.training.step.metric_state import MetricState
from collective.training.step.plan import StepPlan
from collective.training.step.rows import Rows
from collective.training.variants.coupled.forward import CoupledForward
from collective.training.variants.coupled.replica import ReplicaContext, for_replica


class CoupledTestSums(TestSums):
    """With collectives, in which a replica without rows takes part.

    Args:
        plan: Which of loss and metrics are those of the whole batch.
    """

    counts_replicas = True

    def __init__(self, prepared: PreparedModel, backend: Backend, plan: StepPlan):
        self.metrics = MetricState(prepared.model) if plan.gather_metrics else None
        self._prepared = prepared
        self._backend = backend
        self._plan = plan

    def __call__(
        self, weights: Weights, own: ReplicaRows, global_rows: Any, metrics: tf.Tensor
    ) -> tuple[Sums, Found]:
        """Inside ``Backend.run``: the sums."""
        prepared, pieces = self._prepared, pieces_of(self._backend)
        values = self.metrics.unpack(metrics) if self.metrics else None

        def run(replica: ReplicaContext, rows: Rows) -> tuple[Sums, Found]:
            forward = CoupledForward(
                prepared, Draws(prepared), pieces, None, self._plan, replica, values
            )
            return forward.test(weights, rows, global_rows, own.first)

        sums, found = for_replica(
            *(run, self._backend, own.rows, own.count, global_rows), maybe_empty=True
        )
        warn_of_dropped(found, self._backend)
        return sums, found
