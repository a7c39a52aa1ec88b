"""Compares our step with Keras' own on a few rows, and decides what follows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat import StepOutcome
from collective.training.step.plan import StepPlan
from collective.training.step.rows import Rows, or_none
from collective.training.step.step import Step
from collective.training.verification.differences import (
    Difference,
    Explanation,
    Outcomes,
    by_nature,
    close_logs,
    differences,
    outside,
    tolerance,
)
from collective.training.verification.pieces import (
    cut,
    test_in_pieces,
    train_in_pieces,
    undo_writes,
)

# A scale that keeps gradients in float16 from vanishing, and few from overflowing.
_LOSS_SCALE = 256.0
# Differences that have one cause.
_ALIKE = {
    "failure": ("loss", "gradient", "metric"),
    "loss": ("loss", "gradient"),
    "gradient": ("loss", "gradient"),
    "metric": ("metric",),
}


class NotComparable(Exception):
    """Keras' own step cannot be compared with: the text says why."""


class Check:
    """The comparison of a model's step.

    Args:
        step: Our step, an ``UntracedStep``.
        rows: Rows of the first batch, ``()`` for what is absent.
        sizes: The pieces; one, where the step always sees its whole batch.
    """

    def __init__(
        self,
        step: Step,
        rows: Rows,
        validation: Rows | None,
        sizes: Sequence[int],
        sync_batch_norm: bool = False,
    ):
        self.step = step
        self.model = step.model
        self.rows = rows
        self.validation = validation
        self.sizes = list(sizes)
        self.explain = Explanation(self.model, self.sizes)
        self.sync_batch_norm = sync_batch_norm
        self.tolerance = tolerance(self.model)
        overflows = keras_compat.expects_overflow(self.model.optimizer)
        self.loss_scale = _LOSS_SCALE if overflows else 1.0
        trackers = keras_compat.loss_trackers(self.model)
        self.losses = ["loss", *(tracker.name for tracker in trackers)]
        self.notes: list[str] = []

    def run(self) -> StepPlan:
        """Runs it. No variable is changed.

        Raises:
            UsageError: Our step would train another model than Keras'.
            NotComparable: Keras' own step fails, or is random.
        """
        with (
            keras_compat.fixed_randomness(),
            keras_compat.moving_statistics(len(self.sizes) > 1) as normalizing,
        ):
            gather = self._judge(self._outcomes(self.rows, training=True))
            if self.validation is not None:
                gather |= self._judge(self._outcomes(self.validation, training=False))
        if len(self.sizes) > 1:
            normalizing = [] if self.sync_batch_norm else normalizing
            self.notes += by_nature(normalizing)
        notes = tuple(dict.fromkeys(self.notes))
        look_ups = tuple(sorted(self.step.forward.counted.items()))
        return StepPlan("loss" in gather, "metric" in gather, notes, look_ups)

    def _outcomes(self, rows: Rows, training: bool) -> Outcomes:
        """The step by Keras and by us; a third time where they differ."""
        stock, written = self._stock(rows, training)
        if len(self.sizes) > 1 and (stock.outside or written):
            raise outside([*stock.outside, *written])
        own = self._own(rows, training, self.sizes)
        if isinstance(own, Exception):
            found = [self.explain.failed(own)]
        else:
            found = self._differences(stock, own, training)
        if not found:
            return Outcomes(training, stock, own, own, None, [])
        again, _ = self._stock(rows, training)
        if self._differences(stock, again, training):
            raise NotComparable(
                "it draws random numbers by other means than keras.random"
            )
        whole, gathered = own, None
        if len(self.sizes) > 1:
            whole = self._own(rows, training, [sum(self.sizes)])
            with contextlib.suppress(NotComparable):
                gathered, _ = self._stock(rows, training, self._shares(rows))
        return Outcomes(training, stock, own, whole, gathered, found)

    def _own(
        self, rows: Rows, training: bool, sizes: Sequence[int]
    ) -> StepOutcome | Exception:
        """Our step in pieces, or what it raises."""
        try:
            with undo_writes():
                if training:
                    return train_in_pieces(self.step, rows, sizes, self.loss_scale)
                return test_in_pieces(self.step, rows, sizes)
        except UsageError:
            raise
        except Exception as error:
            return error

    def _stock(
        self, rows: Rows, training: bool, pieces: Sequence[tuple[Any, float]] = ()
    ) -> tuple[StepOutcome, list[str]]:
        """Keras' own step, and the ``tf.Variable``s that it wrote."""
        prepared = self.step.prepared
        try:
            with undo_writes() as written:
                outcome = keras_compat.stock_step(
                    *(self.model, prepared.trainable, prepared.state),
                    Rows(*map(or_none, rows)),
                    training=training,
                    loss_scale=self.loss_scale,
                    pieces=pieces,
                )
        except Exception as error:
            raise NotComparable(f"{type(error).__name__}: {error}") from error
        return outcome, list(written)

    def _shares(self, rows: Rows) -> list[tuple[Any, float]]:
        total = sum(self.sizes)
        return [
            (piece.x, size / total)
            for piece, size in zip(cut(rows, self.sizes), self.sizes, strict=True)
        ]

    def _differences(
        self, stock: StepOutcome, other: StepOutcome, training: bool
    ) -> list[Difference]:
        prepared = self.step.prepared
        return list(differences(prepared, stock, other, self.losses, not training))

    def _judge(self, outcomes: Outcomes) -> set[str]:
        """What must be computed on gathered predictions: ``loss``, ``metric``."""
        gather: set[str] = set()
        for difference in outcomes.found:
            part = "metric" if difference.kind == "metric" else "loss"
            if part == "loss" and part in gather:
                continue
            if self._is_rounding(difference, outcomes):
                continue
            if difference.kind in ("state", "weight"):
                raise self.explain.refused(difference)
            if self._differs_alike(difference, outcomes, outcomes.whole):
                raise self.explain.not_keras(difference)
            if self._differs_alike(difference, outcomes, outcomes.gathered):
                raise self.explain.cause(difference, outcomes)
            gather.add(part)
            self.notes.append(self.explain.gather_note(difference))
        return gather

    def _differs_alike(
        self,
        difference: Difference,
        outcomes: Outcomes,
        other: StepOutcome | Exception | None,
    ) -> bool:
        """Whether another outcome differs from Keras' in the same way."""
        if not isinstance(other, StepOutcome):
            return True
        kinds = _ALIKE[difference.kind]
        return any(
            d.kind in kinds and (d.kind != "metric" or d.name == difference.name)
            for d in self._differences(outcomes.stock, other, outcomes.training)
        )

    def _is_rounding(self, difference: Difference, outcomes: Outcomes) -> bool:
        """Whether a metric differs because predictions are rounded to another side.

        A row at a threshold counts or does not count; then the metric of the gathered
        predictions is that of the pieces.
        """
        own, gathered = outcomes.own, outcomes.gathered
        if difference.kind != "metric" or gathered is None:
            return False
        assert isinstance(own, StepOutcome)
        values = own.logs[difference.name], gathered.logs[difference.name]
        return close_logs(*values, self.tolerance)
