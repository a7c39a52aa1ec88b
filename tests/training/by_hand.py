"""The steps of a model one by one, on batches that a test makes."""

from __future__ import annotations

from typing import Any

import keras

from collective.backends.base import Backend
from collective.fit_options import FitOptions
from collective.training import keras_compat
from collective.training.input.pipeline import Batch
from collective.training.model.variables import captured_variables
from collective.training.steps.batch_function import BatchFunction
from collective.training.steps.settings import StepSettings


class Steps:
    """Trains a model on a batch at each call.

    Args:
        model: A model that is built.
        seed: Determines the random layers. If None, the states of their generators do.

    Attributes:
        losses: That of each batch.
        returned: What the last step returned.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        options: FitOptions | None = None,
        seed: int | None = None,
    ):
        settings = StepSettings(backend, options or FitOptions(), reports=True)
        step = model.train_step
        self.function = BatchFunction(model, step, "train_step", settings)
        self.losses: list[float] = []
        self.returned: Any = None
        self._seed = seed

    def __call__(self, batch: Batch) -> float:
        """Make a step on what this process has of a batch; return its loss."""
        if self._seed is not None:
            self.function.trace(batch)
            (program,) = self.function.programs
            states = captured_variables(program.source.graph)
            keras_compat.seeds.reseed(states, self._seed)
            self._seed = None
        self.returned = self.function.run(batch)
        report = self.function.programs[-1].report
        self.losses.append(float(report[0]))
        return self.losses[-1]
