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
from typing import Any

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import compatibility, keras_compat
from collective.training.step.accumulation import slice_rows
from collective.training.step.rows import Rows
from collective.training.variants.coupled.replica import at_least_one_row
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
        own: Of this micro-batch.
    """

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
            raise _refusal(f"takes gradients after its update by {self._applied!r}")
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
            raise _refusal(
                f"has two updates, by {self._applied!r} and {optimizer.name!r}"
            )
        if not self.own:
            raise _refusal("takes no gradients by tf.GradientTape before its update")
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
        raise _refusal(
            "has a loss that is divided by weights or by what a mask leaves, which the "
            "first micro-batch does not know of the others"
        )


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"the train_step cannot be cut into micro-batches (accumulate): it {what}",
        hint=f"{compatibility.FEATURES['accumulate'].without}; --recompute saves memory, "
        "too",
    )


@dataclass(eq=False)
class AccumulatingStep(LocalStep):
    """Calls a ``train_step`` on the micro-batches of one replica's rows.

    Args:
        micro_batches: How many.
        maybe_empty: Whether one may have no rows.
    """

    micro_batches: int = 2
    maybe_empty: bool = True
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
            last = updating.get_concrete_function(rows, own, share, self._specs[1])
            self.note_written(last.graph)

        def call(rows: Rows, own: Share, whole: Share, earlier: Any) -> Any:
            if earlier is None:
                return first(rows, own, whole)
            return last(rows, own, whole, earlier)

        return call

    def _call(
        self, rows: Rows, own: Share, whole: Share, earlier: Gradients | None
    ) -> tuple[Logs, Gradients]:
        hooks = MicroBatchHooks(self.sums, own, self.apply_by, whole, earlier)
        return self.with_hooks(hooks, rows), hooks.own

    def contribution(
        self,
        call: Callable[..., Any],
        rows: Rows,
        share: Share,
        before: Sequence[tf.Tensor],
    ) -> Contribution:
        """Runs the step on all micro-batches; see ``LocalStep.contribution``."""
        seeds = [tf.identity(seed) for seed in self.seeds]

        def one(number: tf.Tensor, earlier: Any) -> tuple[Contribution, Gradients]:
            pairs = zip(
                [*self.state, *self.seeds], [*before[: len(self.state)], *seeds],
                strict=True,
            )  # fmt: skip
            for variable, value in pairs:
                variable.assign(value)
            part, own = self._micro_batch(rows, share, number)
            if tf.executing_eagerly():
                keras_compat.move_noise(int(own.first_row), int(own.rows))
            metrics = [tf.identity(v) for v in self.metrics]
            with tf.control_dependencies(metrics):
                part = tf.nest.map_structure(tf.identity, part)
            logs, gradients = call(part, own, share, earlier)
            start = [*before[: len(self.state)], *metrics]
            return self.changes(logs, own, start), gradients

        def body(number: tf.Tensor, so_far: Any) -> tuple[tf.Tensor, Any]:
            more, gradients = one(number, None)
            return number + 1, tf.nest.map_structure(
                tf.add, so_far, (more.sums, gradients)
            )

        last = tf.constant(self.micro_batches - 1, tf.int64)
        _, (earlier_sums, earlier) = tf.while_loop(
            lambda number, _: number < last,
            body,
            (tf.zeros([], tf.int64), self._zeros()),
            parallel_iterations=1,
        )
        found, _ = one(last, earlier)
        return found._replace(
            sums=tf.nest.map_structure(tf.add, earlier_sums, found.sums)
        )

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
