"""Validation by a model's own ``test_step``, or by Keras' beside its own ``train_step``."""

from __future__ import annotations

from typing import Any

import numpy as np

from collective import recorder
from collective.backends.base import Backend
from collective.training.custom_step.step import CustomStep
from collective.training.input.pipeline import Input
from collective.training.input.source import Source
from collective.training.prepared import PreparedModel


class CustomEvaluation:
    """Evaluates a model by its ``test_step``; the interface of ``Evaluation``.

    Args:
        prepared: The model.
        backend: What sums over replicas.
        source: The rows.
        batch_size: Rows evaluated at a time, over all replicas. Keras shows what the
            last batch returned where that is not the metrics' results.
    """

    def __init__(
        self, prepared: PreparedModel, backend: Backend, source: Source, batch_size: int
    ):
        self.model = prepared.model
        self.backend = backend
        self.input = Input(source, batch_size, shuffle=False)
        self.step = CustomStep(prepared, backend, self.input.spec, method="test_step")

    def __call__(self) -> dict[str, Any]:
        """Evaluates. Every rank must call it; all get the same numbers."""
        self.backend.require_all_ranks()
        place = self.backend.local_replicas, self.backend.replicas
        batches = self.input.dataset(0, self.input.steps_per_epoch, *place)
        self.model.reset_metrics()
        with recorder.span(recorder.OTHER, "validation"):
            reports = [
                self.step(batch, number).numpy() for number, batch in enumerate(batches)
            ]
        return self.step.layout.logs(np.sum(reports, axis=0), reports)
