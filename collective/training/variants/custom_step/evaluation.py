"""Validation by a model's own ``test_step``, or by Keras' beside its own ``train_step``."""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.training.evaluation.exact import BatchwiseEvaluation
from collective.training.input.pipeline import Batch
from collective.training.variants.custom_step.check import check_once
from collective.training.variants.custom_step.step import CustomStep


class CustomEvaluation(BatchwiseEvaluation):
    """Evaluates a model by its ``test_step``; arguments as of ``BatchwiseEvaluation``.

    Keras shows what the last batch returned where that is not the metrics' results.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.step = CustomStep(
            *(self.prepared, self.backend, self.input.spec),
            method="test_step",
        )
        check_once(self.step, self.input)

    def _begin(self) -> None:
        self.model.reset_metrics()

    def _vector(self, batch: Batch, number: int, before: Any) -> Any:
        return self.step(batch, number)

    def _result(self, vectors: list[Any]) -> dict[str, Any]:
        if not vectors:
            return {}
        reports = [vector.numpy() for vector in vectors]
        return self.step.layout.logs(np.sum(reports, axis=0), reports)
