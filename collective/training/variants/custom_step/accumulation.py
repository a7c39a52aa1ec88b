"""A ``train_step`` on micro-batches: one update, by the sums of their gradients.

The step runs once on each micro-batch. Where it takes gradients in the last one, it gets
those of all micro-batches and all replicas, and goes on from there: clips, logs, applies.
In the others they are added up, and what the step would apply is dropped. State begins
with the same values in each; its changes are added up, as over replicas.

So the update must be the last thing that depends on gradients: a step with two updates, as
that of a GAN, is refused. What was computed from gradients otherwise, such as a returned
norm, differs from that of the whole batch, which the check before the first step finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import compatibility, keras_compat
from collective.training.step.accumulation import slice_rows
from collective.training.step.rows import Rows, at_least_one_row
from collective.training.variants.custom_step.local_step import (
    Contribution,
    LocalStep,
    Logs,
)
from collective.training.variants.custom_step.replica import (
    ApplyBy,
    OrderedSums,
    ReplicaHooks,
)
from collective.training.variants.custom_step.share import Share

#: For each call of ``tape.gradient``, what the replica adds to the sums over replicas.
Gradients = list[list[tf.Tensor]]


class MicroBatchHooks(ReplicaHooks):
    """The intercepted calls of one micro-batch.

    Args:
        whole: The replica's share of the batch, of which ``share`` is a part.
        earlier: Of the micro-batches before this one, which is the last; None: another
            one follows.

    Attributes:
        feature: Why the step is cut, by its name in the table of compatibility.
        parts: What it is cut into.
        own: Of this micro-batch.
    """

    feature, parts = "accumulate", "micro-batches"

    def __init__(
        self,
        sums: OrderedSums,
        share: Share,
        apply_by: ApplyBy | None,
        whole: Share,
        earlier: Gradients | None,
    ):
        super().__init__(sums, share, apply_by)
        self.alone = False
        self.whole = whole
        self.own: Gradients = []
        self._earlier = earlier
        self._applied: str | None = None

    @property
    def _is_last(self) -> bool:
        return self._earlier is not None

    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Adds them up; those of the last micro-batch are the sums over replicas."""
        if self._applied is not None:
            raise self._refusal(
                f"takes gradients after its update by {self._applied!r}"
            )
        if self._is_last:
            return super().on_gradients(gradients, variables)
        key = self.additive.next("gradient")
        dense, local = self._weighed(gradients, variables, key, self.share)
        self.own.append(local)
        return dense

    def _replica_sums(self, local: list[tf.Tensor]) -> list[tf.Tensor]:
        assert self._earlier is not None
        self.own.append(local)
        earlier = self._earlier[len(self.own) - 1]
        return [tf.add(*pair) for pair in zip(earlier, local, strict=True)]

    def on_apply(
        self, optimizer: keras.Optimizer, gradients: list[Any], variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The only update."""
        if self._applied is not None:
            raise self._refusal(
                f"has two updates, by {self._applied!r} and {optimizer.name!r}"
            )
        if not self.own:
            raise self._refusal(
                "takes no gradients by tf.GradientTape before its update"
            )
        self._applied = optimizer.name
        if not self._is_last:
            return gradients, []
        return super().on_apply(optimizer, gradients, variables)

    def update(
        self,
        optimizer: keras.Optimizer,
        gradients: list[Any],
        variables: list[Any],
        apply: Callable[..., Any],
    ) -> Any:
        """After the last micro-batch."""
        if self._is_last:
            super().update(optimizer, gradients, variables, apply)

    def _total_weight(self, own: tf.Tensor) -> tf.Tensor:
        raise self._refusal(
            "has a loss that is divided by weights or by what a mask leaves, which the "
            f"first of the {self.parts} does not know of the others"
        )

    def _refusal(self, what: str) -> UsageError:
        return UsageError(
            f"the train_step cannot be cut into {self.parts} ({self.feature}): it {what}",
            hint=f"{compatibility.FEATURES[self.feature].without}; or "
            + compatibility.FEATURES["own_step"].without,
        )


class Run(NamedTuple):
    """What all micro-batches of a replica have in common."""

    call: Callable[..., Any]  # as of ``LocalStep.trace``
    whole: Share  # the replica's share of the batch
    # As of ``LocalStep.contribution``: what each of them begins with.
    before: Sequence[tf.Tensor]
    alike: Sequence[tf.Tensor]  # values of ``LocalStep.alike``, as well


@dataclass(eq=False)
class AccumulatingStep(LocalStep):
    """Calls a ``train_step`` on the micro-batches of one replica's rows."""

    micro_batches: int = 2  # how many
    maybe_empty: bool = True  # whether one may have no rows
    _specs: tuple[Logs, Gradients] = field(default_factory=lambda: ({}, []))

    def trace(self, rows: Rows, share: Share) -> Callable[..., Any]:
        """As of ``LocalStep``."""
        if tf.executing_eagerly():
            return self._call
        rows, own = self._micro_batch(rows, share, tf.zeros([], tf.int64))

        def call_first(rows: Rows, own: Share, whole: Share) -> Any:
            return self._call(rows, own, whole, None)

        followed = tf.function(call_first, autograph=False)
        first = followed.get_concrete_function(rows, own, share)
        self._specs = first.structured_outputs
        last = self._call
        if not self.inline:
            updating = tf.function(self._call, autograph=False)
            earlier = self._earlier_of(self._specs[1])
            last = updating.get_concrete_function(rows, own, share, earlier)
            self.note_written(last.graph)

        def call(rows: Rows, own: Share, whole: Share, earlier: Any) -> Any:
            if earlier is None:
                return first(rows, own, whole)
            return last(rows, own, whole, earlier)

        return call

    def _call(
        self, rows: Rows, own: Share, whole: Share, earlier: Gradients | None
    ) -> tuple[Logs, Gradients]:
        hooks = self._hooks_of(earlier)(self.sums, own, self.apply_by, whole, earlier)
        return self.with_hooks(hooks, rows), hooks.own

    @property
    def is_whole(self) -> bool:
        """Not that of the last micro-batch."""
        return False

    def _hooks_of(self, earlier: Gradients | None) -> type[MicroBatchHooks]:
        return MicroBatchHooks

    def _earlier_of(self, gradients: Gradients) -> Gradients:
        """What the call that updates is given, from the gradients of a micro-batch."""
        return gradients

    def contribution(
        self,
        call: Callable[..., Any],
        rows: Rows,
        share: Share,
        before: Sequence[tf.Tensor],
    ) -> Contribution:
        """Runs the step on all micro-batches; see ``LocalStep.contribution``."""
        alike = [tf.identity(variable) for variable in self.alike]
        return self._on_all(Run(call, share, before, alike), rows)

    def _on_all(self, run: Run, rows: Rows) -> Contribution:
        last = self.micro_batches - 1
        earlier_sums, earlier = self._add_up(run, rows, run.whole, last)
        part, own = self._micro_batch(rows, run.whole, tf.constant(last, tf.int64))
        found, _ = self._one(run, part, own, earlier)
        return found._replace(
            sums=tf.nest.map_structure(tf.add, earlier_sums, found.sums)
        )

    def _add_up(self, run: Run, rows: Rows, share: Share, micro_batches: int) -> Any:
        """The sums over the first micro-batches of some rows, and their gradients."""

        def body(number: tf.Tensor, so_far: Any) -> tuple[tf.Tensor, Any]:
            part, own = self._micro_batch(rows, share, number)
            more, gradients = self._one(run, part, own, None)
            return number + 1, tf.nest.map_structure(
                tf.add, so_far, (more.sums, gradients)
            )

        _, found = tf.while_loop(
            lambda number, _: number < micro_batches,
            body,
            (tf.zeros([], tf.int64), self._zeros()),
            parallel_iterations=1,
        )
        return found

    def _one(
        self, run: Run, rows: Rows, own: Share, earlier: Gradients | None
    ) -> tuple[Contribution, Gradients]:
        """Runs the step on one micro-batch."""
        variables = [*self.state, *self.metrics, *self.alike]
        values = [*run.before, *run.alike]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        if tf.executing_eagerly():
            keras_compat.move_noise(int(own.first_row), int(own.rows))
        begun = [tf.identity(v) for v in variables]
        with tf.control_dependencies(begun):
            rows = tf.nest.map_structure(tf.identity, rows)
        logs, gradients = run.call(rows, own, run.whole, earlier)
        return self.changes(logs, own, run.before), gradients

    def _micro_batch(
        self, rows: Rows, share: Share, number: tf.Tensor
    ) -> tuple[Rows, Share]:
        count = share.rows
        start = number * count // self.micro_batches
        stop = (number + 1) * count // self.micro_batches
        part: Rows = slice_rows(rows, start, stop)
        if self.maybe_empty:
            part = at_least_one_row(part, stop - start)
        own = share._replace(rows=stop - start, first_row=share.first_row + start)
        return part, own

    def _zeros(self) -> Any:
        """The sums over no micro-batch."""
        logs, gradients = self._specs
        wide = [
            [tf.zeros(v.shape, tf.float64) for v in each]
            for each in (self.state, self.metrics)
        ]
        others = self.others_of(logs)
        values = {n: tf.zeros(logs[n].shape, tf.float64) for n in others}
        none = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), gradients)
        return (*wide, values), none
