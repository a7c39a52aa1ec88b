"""Compares our step with Keras' own on a few rows, and decides what follows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat import StepOutcome
from collective.training.step.plan import StepPlan
from collective.training.step.rows import Rows, or_none
from collective.training.verification import coupled_layers
from collective.training.verification.differences import (
    Difference,
    Explanation,
    Outcomes,
    by_nature,
    close_logs,
    differences,
    left_out,
    outside,
    rounding,
    sampled,
    tolerance,
    updates,
)
from collective.training.verification.first_rows import count, cut, uneven
from collective.training.verification.graph import Traced, is_zero, trace
from collective.training.verification.pieces import (
    Untraced,
    packed,
    undo_writes,
)

# A scale that keeps gradients in float16 from vanishing, and few from overflowing.
_LOSS_SCALE = 256.0
# What a weight of the loss that is zero at first is compared with.
_RAISED = 0.5
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
        batches: Rows of the first batches to train on, ``()`` for what is absent.
        validation: Rows to test with.
        pieces: Into how many the rows are cut; one, where the step always sees its
            whole batch.
        sync_batch_norm: Whether layers of batch normalization see whole batches.
        updates: Whether the weights after the batches are compared, too.
        gathers: Whether replicas may compute layers on the rows of all.
    """

    def __init__(
        self,
        step: Untraced,
        batches: Sequence[Rows],
        validation: Rows | None,
        pieces: int,
        sync_batch_norm: bool = False,
        updates: bool = False,
        gathers: bool = False,
    ):
        self.step = step
        self.model = step.model
        self.batches = batches
        self.validation = validation
        self.pieces = pieces
        self.sizes: list[int] = []
        self.sync_batch_norm = sync_batch_norm
        self.updates = updates
        self.gathers = gathers and pieces > 1
        #: Layers that are computed on whole batches.
        self.whole: tuple[int, ...] = ()
        self.tolerance = tolerance(self.model)
        self._graphs: Sequence[Traced | None] | None = None
        overflows = keras_compat.expects_overflow(self.model.optimizer)
        self.loss_scale = _LOSS_SCALE if overflows else 1.0
        trackers = keras_compat.loss_trackers(self.model)
        self.losses = ["loss", *(tracker.name for tracker in trackers)]
        self.notes: list[str] = []
        #: What must be computed on gathered predictions: ``loss``, ``metric``.
        self.gather: set[str] = set()

    def traced(self) -> list[Traced | None]:
        """Keras' own step on such rows as graphs: in training, and as a test."""
        prepared = self.step.prepared
        known = [*prepared.trainable, *prepared.state]
        places = prepared.trainable, prepared.state

        def graph(rows: Rows, training: bool) -> Traced | None:
            def stock(rows: Rows) -> Any:
                batch = Rows(*map(or_none, rows))
                return keras_compat.stock_tensors(
                    self.model, *places, batch, training=training
                )

            with keras_compat.fixed_randomness():
                return trace(stock, rows, known)

        found = [graph(self.batches[0], True)] if self.batches else []
        tests = [] if self.validation is None else [self.validation]
        return found + [graph(rows, False) for rows in tests]

    def run(self, traced: Sequence[Traced | None] = ()) -> StepPlan:
        """Runs it. No variable is changed.

        Raises:
            UsageError: Our step would train another model than Keras'.
            NotComparable: Keras' own step fails, or is random.
        """
        with (
            keras_compat.fixed_randomness(),
            keras_compat.moving_statistics(self.pieces > 1) as normalizing,
        ):
            outcomes = []
            for rows in self.batches:
                outcomes.append(self._judged(rows, training=True))
            if self.validation is not None:
                self._judged(self.validation, training=False)
            for rows in self.batches[:1]:
                with self._raised(traced) as raised:
                    if raised:
                        self._judge_if_possible(rows)
            if self.updates and not self.gather and not self.whole:
                self._compare_updates(outcomes)
        if self.pieces > 1:
            normalizing = [] if self.sync_batch_norm else normalizing
            self.notes += by_nature(normalizing)
        notes = tuple(dict.fromkeys(self.notes))
        look_ups = tuple(sorted(self.step.counted.items()))
        return StepPlan(
            gather_loss="loss" in self.gather,
            gather_metrics="metric" in self.gather,
            notes=notes,
            look_ups=look_ups,
            added_sums=self.step.plan.added_sums,
            whole_layers=self.whole,
        )

    @contextlib.contextmanager
    def _raised(self, traced: Sequence[Traced | None]) -> Iterator[bool]:
        """Gives weights of the loss that are zero now, and raised later, a value.

        Yields:
            Whether there are any.
        """
        outside = [v for found in traced if found for v in found.outside]
        state = [v for v in self.step.prepared.state if "float" in str(v.dtype)]
        zeros = [v for v in [*outside, *state] if is_zero(v)]
        for variable in zeros:
            variable.assign(_RAISED * tf.ones_like(tf.convert_to_tensor(variable)))
        try:
            yield bool(zeros)
        finally:
            for variable in zeros:
                variable.assign(tf.zeros_like(tf.convert_to_tensor(variable)))

    def _judge_if_possible(self, rows: Rows) -> None:
        """As ``_judge``; nothing where the model cannot be run with such values."""
        with contextlib.suppress(NotComparable):
            self._judged(rows, training=True)

    def _compare_updates(self, outcomes: Sequence[Outcomes]) -> None:
        """The weights after Keras' own training steps, and after ours."""
        step, weights = self.step, self.step.prepared.trainable
        first, own = outcomes[0].stock, outcomes[0].own
        if len(outcomes) == 1:
            assert isinstance(own, StepOutcome)
            return self._compare_optimizers(step, first.gradients, own.gradients)
        found = []
        for ours in (False, True):
            with undo_writes():
                for rows in self.batches:
                    if ours:
                        step.apply(rows, uneven(count(rows), self.pieces))
                    else:
                        with keras_compat.dense_gradients(self.model.optimizer):
                            self.model.train_step(packed(rows))
                found.append([np.array(v) for v in weights])
        before = [np.array(v) for v in weights]
        for difference in updates(
            weights, before, first.gradients, found[0], found[1], self.tolerance
        ):
            raise self.explain.not_keras(difference)

    def _compare_optimizers(
        self,
        step: Untraced,
        stock: Sequence[np.ndarray | None],
        own: Sequence[np.ndarray | None],
    ) -> None:
        """As ``_compare_updates`` after one step, whose gradients are known already."""
        weights, optimizer = step.prepared.trainable, self.model.optimizer
        found = []
        for gradients in (stock, own):
            pairs = [
                (tf.constant(gradient, variable.dtype), variable)
                for gradient, variable in zip(gradients, weights, strict=True)
                if gradient is not None
            ]
            tensors, variables = map(list, zip(*pairs, strict=True))
            with undo_writes():
                if gradients is stock:
                    optimizer.apply(tensors, variables)
                else:
                    assign = step.backend.assign
                    keras_compat.apply(optimizer, tensors, variables, assign, weights)
                found.append([sampled(v.numpy()) for v in weights])
        before = [sampled(v.numpy()) for v in weights]
        parts = [None if gradient is None else sampled(gradient) for gradient in stock]
        for difference in updates(
            weights, before, parts, found[0], found[1], self.tolerance
        ):
            raise self.explain.not_keras(difference)

    @property
    def explain(self) -> Explanation:
        """For the rows that are compared now."""
        return Explanation(self.model, self.sizes, self.tolerance)

    def _outcomes(self, rows: Rows, training: bool) -> Outcomes:
        """The step by Keras and by us; a third time where they differ."""
        self.sizes = uneven(count(rows), self.pieces)
        stock, written = self._stock(rows, training)
        loss = np.asarray(stock.logs.get("loss", 0.0), np.float64)
        if not np.all(np.isfinite(loss)):
            return self._not_finite(stock, loss)
        if len(self.sizes) > 1 and (stock.outside or written):
            raise outside([*stock.outside, *written])
        own = self._own(rows, training, self.sizes)
        found = self._found(stock, own, training)
        if isinstance(own, StepOutcome):
            self.notes += left_out(self.model, stock.logs, own.logs)
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
            if self._knows_new_sums(stock, gathered, training):
                return self._outcomes(rows, training)
        return Outcomes(training, stock, own, whole, gathered, found)

    def _not_finite(self, stock: StepOutcome, loss: np.ndarray) -> Outcomes:
        """Nothing to compare with: in a validation beside a training nothing is found."""
        training = bool(stock.gradients)
        if training or not self.batches:
            raise NotComparable(
                f"its loss on {sum(self.sizes)} rows of the first batches is {loss}, by "
                "Keras' own step, too: look for NaN in the data, the labels or the first weights"
            )
        return Outcomes(training, stock, stock, stock, None, [])

    def _own(
        self, rows: Rows, training: bool, sizes: Sequence[int]
    ) -> StepOutcome | Exception:
        """Our step in pieces, or what it raises."""
        try:
            with undo_writes(), self._whole_calls(rows, training, sizes):
                if training:
                    return self.step.train(rows, sizes, self.loss_scale)
                return self.step.test(rows, sizes)
        except UsageError:
            raise
        except Exception as error:
            return error

    def _stock(
        self,
        rows: Rows,
        training: bool,
        pieces: Sequence[tuple[Any, float]] = (),
        between: Callable[[], list[Any]] = list,
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
                    sums=self.step.plan.added_sums,
                    between=between,
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
        allowed = self.tolerance
        found = differences(prepared, stock, other, self.losses, allowed, not training)
        return list(found)

    def _found(
        self, stock: StepOutcome, own: StepOutcome | Exception, training: bool
    ) -> list[Difference]:
        """Where ours differs."""
        if isinstance(own, Exception):
            return [self.explain.failed(own)]
        found = self._differences(stock, own, training)
        if found and self._rounds_more():
            return self._differences(stock, own, training)
        return found

    def _rounds_more(self) -> bool:
        """Whether operations of the step round more than its layers' dtypes say.

        As a CTC loss does, which is in float32 always. The tolerance follows them.
        """
        if self._graphs is None:
            self._graphs = self.traced()
        casts = {name for found in self._graphs if found for name in found.rounds_to}
        before, self.tolerance = self.tolerance, max(self.tolerance, rounding(casts))
        return self.tolerance > before

    def _knows_new_sums(
        self, stock: StepOutcome, gathered: StepOutcome | None, training: bool
    ) -> bool:
        """Whether more values of ``add_loss`` turn out to be sums over rows.

        The training has the same as its validation.
        """
        if gathered is None or (self.batches and not training):
            return False
        known, shares = set(self.step.plan.added_sums), np.array(self.sizes)
        shares = shares / shares.sum()
        terms = zip(stock.terms, gathered.terms, strict=False)
        new = {
            place
            for place, ((whole,), parts) in enumerate(terms)
            if close_logs(whole, np.sum(parts), self.tolerance)
            and not close_logs(whole, np.dot(shares, parts), self.tolerance)
        } - known
        if new:
            sums = tuple(sorted(known | new))
            self.step.plan = dataclasses.replace(self.step.plan, added_sums=sums)
        return bool(new)

    @contextlib.contextmanager
    def _whole_calls(
        self, rows: Rows, training: bool, sizes: Sequence[int]
    ) -> Iterator[None]:
        """Around our step: layers that couple rows are called on all of them."""
        if not self.whole or len(sizes) == 1:
            yield
            return
        calls = coupled_layers.WholeCalls(self.model, self.whole, sizes)
        with calls.recorded():
            stock, _ = self._stock(rows, training, (), calls.inputs)
        calls.gradients = iter(stock.of_between)
        with calls.repeated():
            yield

    def _judged(self, rows: Rows, training: bool) -> Outcomes:
        """The outcomes, judged; where they cannot be right, by layers of whole batches."""
        outcomes = self._outcomes(rows, training)
        try:
            self._judge(outcomes)
        except UsageError:
            if self.whole or not (self.gathers and self._find_whole(outcomes, rows)):
                raise
            layers = list(self.model._flatten_layers())
            names = ", ".join(repr(layers[place].name) for place in self.whole)
            self.notes.append(
                f"layer {names} couples the rows of a batch: it is computed on the rows "
                "of all replicas, on each of them, each step"
            )
            return self._judged(rows, training)
        return outcomes

    def _find_whole(self, outcomes: Outcomes, rows: Rows) -> bool:
        """Looks for layers that couple rows; whether they are all that does."""
        training = outcomes.training

        def equals(places: Sequence[int]) -> bool:
            self.whole = tuple(places)
            own = self._own(rows, training, self.sizes)
            return not self._found(outcomes.stock, own, training)

        self.whole = coupled_layers.fewest(
            coupled_layers.candidates(self.model), equals
        )
        return bool(self.whole)

    def _judge(self, outcomes: Outcomes) -> None:
        """Adds to ``gather`` what gathered predictions make right.

        What has been found with the rows before needs not be found again.
        """
        for difference in outcomes.found:
            part = "metric" if difference.kind == "metric" else "loss"
            noted = self.explain.gather_note(difference)
            if noted in self.notes or (part == "loss" and part in self.gather):
                continue
            if self._is_rounding(difference, outcomes):
                continue
            if difference.kind in ("state", "weight"):
                raise self.explain.refused(difference)
            if self._differs_alike(difference, outcomes, outcomes.whole):
                raise self.explain.not_keras(difference)
            if self._differs_alike(difference, outcomes, outcomes.gathered):
                raise self.explain.cause(difference, outcomes)
            self.gather.add(part)
            self.notes.append(noted)

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
