"""Loss and metrics over a data set, as one process computes them: Keras' ``test_step``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from collective import recorder
from collective.backends.base import Backend
from collective.errors import UsageError
from collective.fit_options import FitOptions
from collective.training.input.batches import Batches
from collective.training.input.feed import ENDLESS
from collective.training.input.pipeline import Batch, Input, ReadAhead
from collective.training.loop.batch_methods import BatchMethods
from collective.training.loop.callbacks import CallbackMethods
from collective.training.loop.loop import TrainingStep
from collective.training.model.prepared import PreparedModel
from collective.training.process import interrupts
from collective.training.steps import own_batches
from collective.training.steps.choose_step import make_step


class Evaluation:
    """Evaluates a model on batches in order, ``steps`` at most, by its ``test_step``."""

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        step: TrainingStep,
        inputs: Input | Batches,
        steps: int | None = None,
    ):
        self.model = model
        self.backend = backend
        self.input = inputs
        self.steps = steps
        self._cut_for = range(0), 0
        self._step = step

    def __call__(
        self, methods: CallbackMethods | None = None, epoch: int = 0
    ) -> dict[str, Any]:
        """Evaluates. Every rank must call it; all get the same numbers.

        Args:
            methods: Calls ``on_test_*`` of callbacks.
            epoch: The epoch that is validated.

        Returns:
            ``loss``, the losses of single outputs, and the metrics.
        """
        self.backend.require_all_ranks()
        self.model.stop_evaluating = False
        methods = methods or CallbackMethods((), self.model, self.backend, {})
        methods.call("on_test_begin", (epoch,), {})
        self.model.reset_metrics()
        with recorder.span(recorder.OTHER, "validation"):
            logs = self._result(self._vectors(BatchMethods(methods, "test"), epoch))
        methods.call("on_test_end", (epoch,), dict(sorted(logs.items())))
        return logs

    @property
    def batches(self) -> int | None:
        """Return the number of batches, as far as it is known."""
        known = self.input.steps_per_epoch
        return known if self.steps is None else min(self.steps, known or self.steps)

    def _vectors(self, methods: BatchMethods, epoch: int) -> list[Any]:
        """Return the sums over each batch."""
        vectors: list[Any] = []
        for number, batch in enumerate(self._batches()):
            interrupts.check()
            methods.before(number, epoch)
            vectors.append(self._step(batch, number))
            if methods.ends(number, number + 1 == self.batches):
                methods.after(lambda: self._result(vectors), epoch)
            if self.model.stop_evaluating:
                break
        methods.after(lambda: self._result(vectors), epoch)
        if not vectors:
            raise UsageError(
                "there are not rows to evaluate",
                hint="pass data that can be read more than once: a generator gives its "
                "batches only once",
            )
        return vectors

    def _result(self, vectors: list[Any]) -> dict[str, Any]:
        """Return the logs of these batches."""
        if not vectors:
            return {}
        return self._step.layout.logs(vectors[-1].numpy())

    def _batches(self) -> Iterator[Batch]:
        if isinstance(self.input, Batches):
            self.input.reset()
            return self.input.epoch(self.steps or ENDLESS)
        place = self.backend.local_replicas, self.backend.replicas
        if place != self._cut_for:  # at first, and when ranks have died
            assert self.batches is not None
            self._dataset = self.input.dataset(0, self.batches, *place)
            self._cut_for = place
        return ReadAhead(self._dataset)


def make_evaluation(
    prepared: PreparedModel,
    backend: Backend,
    inputs: Input | Batches,
    steps: int | None = None,
) -> Evaluation:
    """Return the evaluation of a model, on batches as its training had them."""
    several = backend.most_replicas > 1
    own = own_batches.trained_with(prepared.model) if several else False
    step = make_step(
        prepared,
        backend,
        inputs.spec,
        FitOptions(per_replica=own),
        method="test_step",
        is_stacked=isinstance(inputs, Batches) and inputs.is_stacked,
    )
    return Evaluation(prepared.model, backend, step, inputs, steps)
