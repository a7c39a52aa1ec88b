"""Evaluation by Keras' own ``test_step``, or the model's, partitioned by rows."""

from __future__ import annotations

from typing import Any

from collective.backends.base import Backend
from collective.training import own_batches
from collective.training.evaluation.exact import BatchwiseEvaluation
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Batch, Input
from collective.training.partition.own_rows import OwnRowsStep
from collective.training.partition.step import PartitionedStep
from collective.training.partition.whole import WholeStep
from collective.training.prepared import PreparedModel
from collective.training.step.report import Averages


class PartitionedEvaluation(BatchwiseEvaluation):
    """Loss and metrics as one process computes them; arguments as of the base class."""

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        inputs: Input | Batches,
        steps: int | None = None,
    ):
        super().__init__(prepared, backend, inputs, steps)
        self._step = _step(prepared, backend, inputs)

    def _begin(self) -> None:
        self.model.reset_metrics()

    def _vector(self, batch: Batch, number: int, before: Any) -> Any:
        return self._step(batch, number)

    def _result(self, vectors: list[Any]) -> dict[str, Any]:
        if not vectors:
            return {}
        averages = Averages(self._step.layout)
        for vector in vectors:
            averages.add(vector)
        return averages.logs()


def _step(
    prepared: PreparedModel, backend: Backend, inputs: Input | Batches
) -> PartitionedStep | WholeStep | OwnRowsStep:
    """The step that evaluates a batch, as the one that trained on it."""
    model = prepared.model
    if own_batches.trained_with(model) and backend.most_replicas > 1:
        is_stacked = isinstance(inputs, Batches) and inputs.is_stacked
        return OwnRowsStep(
            *(prepared, backend, inputs.spec),
            method="test_step",
            is_stacked=is_stacked,
        )
    kind = WholeStep if model.run_eagerly else PartitionedStep
    return kind(prepared, backend, inputs.spec, method="test_step")
