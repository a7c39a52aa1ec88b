"""Evaluation by Keras' own ``test_step``, or the model's, partitioned by rows."""

from __future__ import annotations

from typing import Any

from collective.backends.base import Backend
from collective.training.evaluation.exact import BatchwiseEvaluation
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Batch, Input
from collective.training.partition.step import PartitionedStep
from collective.training.prepared import PreparedModel


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
        self._step = PartitionedStep(prepared, backend, inputs.spec, method="test_step")

    def _begin(self) -> None:
        self._step.begin_epoch()

    def _vector(self, batch: Batch, number: int, before: Any) -> Any:
        return self._step(batch, number)

    def _result(self, vectors: list[Any]) -> dict[str, Any]:
        if not vectors:
            return {}
        last = vectors[-1].numpy()
        return self._step.layout.logs(last, [last])
