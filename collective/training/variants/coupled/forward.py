"""The pass of one replica that asks the others: for their predictions, or their look-ups."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from collective.training import keras_compat
from collective.training.prepared import PreparedModel
from collective.training.step.draws import Draws
from collective.training.step.forward import Forward, Predicted, Recompute
from collective.training.step.found import LookUps
from collective.training.step.losses import LossSums
from collective.training.step.plan import StepPlan
from collective.training.step.rows import Rows
from collective.training.variants.coupled import look_ups, whole_layers
from collective.training.variants.coupled.replica import ReplicaContext, current
from collective.training.variants.coupled.whole import WholeBatch, gather


class CoupledForward(Forward):
    """A pass with collectives in it; made for each trace.

    Args:
        plan: Whether loss and metrics are those of the whole global batch, and how the
            gradients of look-ups travel.
        metrics: Values of the metrics' variables, from which metrics of the whole global
            batch continue; all others count from zero.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        draws: Draws,
        pieces: tuple[int, int],
        recompute: Recompute | None,
        plan: StepPlan,
        replica: ReplicaContext,
        metrics: list[tf.Tensor] | None,
    ):
        super().__init__(prepared, draws, pieces, recompute, plan)
        self.replica = replica
        self._continues_from = metrics

    def _call(
        self,
        scope: keras_compat.ForwardScope,
        rows: Rows,
        global_rows: tf.Tensor,
        training: bool,
    ) -> tuple[Predicted | WholeBatch, LossSums]:
        plan = self.plan
        with scope, self._of_replica(rows, global_rows):
            with whole_layers.computed(self.model, plan, self.replica):
                own = self._predict(rows, training)
            added = self._added(rows, global_rows)
            if not plan.gather_loss:
                loss = self._loss(own, added, global_rows, training)
        if not (plan.gather_loss or plan.gather_metrics):
            return own, loss
        whole = WholeBatch(
            self.model,
            gather(self.model, own, self.replica),
            self.replica,
            self._metric_variables,
            self._continues_from,
        )
        if plan.gather_loss:
            loss = whole.loss(scope, self.prepared, added, training)
        return whole if plan.gather_metrics else own, loss

    def _take_look_ups(self, gradients: list[list[Any]]) -> dict[int, LookUps]:
        return look_ups.take(gradients, self.replica, self.plan)

    def _metrics(
        self,
        scope: keras_compat.ForwardScope,
        rows: Rows,
        global_rows: tf.Tensor,
        seen: Any,
    ) -> list[tf.Tensor]:
        if isinstance(seen, WholeBatch):
            return seen.metrics(scope.values(self._metric_variables))
        sums = super()._metrics(scope, rows, global_rows, seen)
        return [self.replica.own(value) for value in sums]


def keeps_activations(layer: Any) -> bool:
    """Whether a layer communicates, or its gradient is wanted by single look-ups.

    A block that is computed twice would send twice.
    """
    replica = current()
    if replica is None:
        return False
    return looks_up(layer) or any(
        isinstance(one, keras.layers.BatchNormalization)
        or id(one) in replica.whole_layers
        for one in getattr(layer, "_flatten_layers", list)()
    )


def looks_up(layer: Any) -> bool:
    """Whether it has an embedding: a block that is computed twice adds look-ups up."""
    return any(
        isinstance(one, keras.layers.Embedding)
        for one in getattr(layer, "_flatten_layers", list)()
    )
