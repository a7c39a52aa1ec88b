"""Evaluation a batch at a time: which batches, and which hooks of callbacks.

``Evaluation`` adds up loss and metrics, ``CustomEvaluation`` runs a model's own
``test_step``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from collective import recorder
from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training.callbacks.hooks import BatchHooks, Hooks
from collective.training.input.batches import Batches
from collective.training.input.feed import ENDLESS
from collective.training.input.pipeline import Batch, Input
from collective.training.prepared import PreparedModel


class BatchwiseEvaluation(ABC):
    """Evaluates a model on batches in order, sharded over the replicas.

    Args:
        steps: How many batches, at most.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        inputs: Input | Batches,
        steps: int | None = None,
    ):
        self.prepared = prepared
        self.model = prepared.model
        self.backend = backend
        self.input = inputs
        self.steps = steps
        self._cut_for = range(0), 0

    def __call__(self, hooks: Hooks | None = None, epoch: int = 0) -> dict[str, Any]:
        """Evaluates. Every rank must call it; all get the same numbers.

        Args:
            hooks: Calls ``on_test_*`` of callbacks.
            epoch: The epoch that is validated.

        Returns:
            ``loss``, the losses of single outputs, and the metrics.
        """
        self.backend.require_all_ranks()
        self.model.stop_evaluating = False
        hooks = hooks or Hooks((), self.model, self.backend, {})
        hooks.call("on_test_begin", (epoch,), {})
        self._begin()
        with recorder.span(recorder.OTHER, "validation"):
            logs = self._result(self._vectors(BatchHooks(hooks, "test"), epoch))
        hooks.call("on_test_end", (epoch,), dict(sorted(logs.items())))
        return logs

    @property
    def batches(self) -> int | None:
        """How many there are, as far as known."""
        known = self.input.steps_per_epoch
        return known if self.steps is None else min(self.steps, known or self.steps)

    def _vectors(self, hooks: BatchHooks, epoch: int) -> list[Any]:
        """The sums over each batch."""
        vectors: list[Any] = []
        for number, batch in enumerate(self._batches()):
            hooks.before(number, epoch)
            before = vectors[-1] if vectors else None
            vectors.append(self._vector(batch, number, before))
            if hooks.ends(number, number + 1 == self.batches):
                hooks.after(lambda: self._result(vectors), epoch)
            if self.model.stop_evaluating:
                break
        hooks.after(lambda: self._result(vectors), epoch)
        if not vectors:
            raise UsageError(
                "there are no rows to evaluate",
                hint="pass data that can be read more than once: a generator gives its "
                "batches only once",
            )
        return vectors

    def _begin(self) -> None:
        """Before the first batch."""

    @abstractmethod
    def _vector(self, batch: Batch, number: int, before: Any) -> Any:
        """Evaluates a global batch; the same on every rank.

        Args:
            batch: This process' rows.
            number: Of the batch.
            before: What this returned for the batch before it; None for the first.
        """

    @abstractmethod
    def _result(self, vectors: list[Any]) -> dict[str, Any]:
        """The logs of these batches."""

    def _batches(self) -> Iterator[Batch]:
        if isinstance(self.input, Batches):
            self.input.reset()
            return self.input.epoch(self.steps or ENDLESS)
        place = self.backend.local_replicas, self.backend.replicas
        if place != self._cut_for:  # at first, and when ranks have died
            assert self.batches is not None
            self._dataset = self.input.dataset(0, self.batches, *place)
            self._cut_for = place
        return iter(self._dataset)
