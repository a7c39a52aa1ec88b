"""Loss and metrics over a data set, exact whatever the number of replicas.

Every replica adds up its rows; sums are divided once, at the end. Nothing is padded
and no average is averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from collective import recorder
from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.accumulation import accumulate
from collective.training.forward import Forward, Sums
from collective.training.hooks import BatchHooks, Hooks
from collective.training.input.batches import Batches
from collective.training.input.feed import ENDLESS
from collective.training.input.pipeline import Batch, Input
from collective.training.input.source import Source
from collective.training.prepared import PreparedModel
from collective.training.step_inputs import (
    Rows,
    read_weights,
    replica_rows,
    weight_specs,
    without_none,
)


class Evaluation:
    """Evaluates a model on a source, sharded over the replicas.

    Args:
        prepared: The model.
        backend: What sums over replicas.
        source: The rows, or batches of them.
        batch_size: Rows evaluated at a time, over all replicas; of no effect on
            batches.
        steps: How many batches, at most.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        source: Source | Batches,
        batch_size: int,
        steps: int | None = None,
    ):
        self.model = prepared.model
        self.backend = backend
        self.input = (
            source
            if isinstance(source, Batches)
            else Input(source, batch_size, shuffle=False)
        )
        self.steps = steps
        self.forward = Forward(prepared, seed=0)
        self._cut_for = range(0), 0
        spec = without_none(self.input.spec)
        self._local = tf.function(
            self.forward.test,
            input_signature=(
                weight_specs(self.model),
                Rows(spec.x, spec.y, spec.sample_weight),
                spec.global_rows,
            ),
            autograph=False,
        )
        self._shapes: Sums = self._local.get_concrete_function().structured_outputs
        self._run = tf.function(
            lambda batch: backend.run(self._replica, (batch,)),
            input_signature=(spec,),
            autograph=False,
        )

    def __call__(self, hooks: Hooks | None = None, epoch: int = 0) -> dict[str, float]:
        """Evaluates. Every rank must call it; all get the same numbers.

        Args:
            hooks: Calls ``on_test_*`` of callbacks.
            epoch: The epoch that is validated.

        Returns:
            ``loss``, the losses of single outputs, and the metrics.
        """
        self.backend.require_all_ranks()
        batch_hooks = None
        if hooks is not None:
            self.model.stop_evaluating = False
            hooks.call("on_test_begin", (epoch,), {})
            batch_hooks = BatchHooks(hooks, "test")
        with recorder.span(recorder.OTHER, "validation"):
            vectors = self._vectors(batch_hooks, epoch)
            total = np.sum([vector.numpy() for vector in vectors], axis=0)
        logs = self._logs(total)
        if hooks is not None:
            hooks.call("on_test_end", (epoch,), dict(sorted(logs.items())))
        return logs

    @property
    def batches(self) -> int | None:
        """How many there are, as far as known."""
        known = self.input.steps_per_epoch
        return known if self.steps is None else min(self.steps, known or self.steps)

    def _vectors(self, hooks: BatchHooks | None, epoch: int) -> list[Any]:
        """The sums over each batch."""
        vectors: list[Any] = []

        def after() -> None:
            logs: dict[str, Any] = {}
            if hooks is not None and hooks.wants_logs:
                logs = self._logs(np.sum([v.numpy() for v in vectors], axis=0))
            if hooks is not None:
                hooks.after(dict(sorted(logs.items())), epoch)

        for number, batch in enumerate(self._batches()):
            if hooks is not None:
                hooks.before(number, epoch)
            vectors.append(self.backend.call(self._run, (without_none(batch),)))
            if hooks is not None:
                if hooks.ends(number, number + 1 == self.batches):
                    after()
                if self.model.stop_evaluating:
                    break
        after()
        if not vectors:
            raise UsageError(
                "there are no rows to evaluate",
                hint="pass data that can be read more than once: a generator gives its "
                "batches only once",
            )
        return vectors

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

    def _replica(self, batch: Batch) -> tf.Tensor:
        """Sums over one global batch as a vector; all but the metrics times rows."""
        replica = tf.cast(self.backend.replica(), tf.int64)
        own = replica_rows(self.backend, batch, replica)
        weights = read_weights(self.model)
        sums, _ = accumulate(
            lambda _, rows, state: (
                self._local(weights, rows, batch.global_rows),
                state,
            ),
            lambda: tf.nest.map_structure(
                lambda t: tf.zeros(t.shape, t.dtype), self._shapes
            ),
            [],
            own.count,
            own.rows,
            micro_batches=1,
            maybe_empty=True,
        )
        count = tf.cast(batch.global_rows, tf.float64)
        metrics = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in sums.metrics]
        others = [
            tf.reshape(tf.cast(t, tf.float64) * count, [1])
            for t in tf.nest.flatten(sums._replace(metrics=[]))
        ]
        local = tf.concat([tf.cast([own.count], tf.float64), *others, *metrics], axis=0)
        return self.backend.all_reduce([local])[0]

    def _logs(self, total: np.ndarray) -> dict[str, float]:
        rows, rest = total[0], total[1:]
        pieces: list[Any] = []
        for spec in tf.nest.flatten(self._shapes):
            size = int(np.prod(spec.shape))
            pieces.append(rest[:size].reshape(spec.shape))
            rest = rest[size:]
        sums: Sums = tf.nest.pack_sequence_as(self._shapes, pieces)
        planned, *weighed = sums.losses
        loss = planned / rows + sum(
            t / w if w else 0.0 for t, w in zip(weighed, sums.weights, strict=True)
        )
        logs = {"loss": float(loss)}
        trackers = keras_compat.loss_trackers(self.model)
        for tracker, (t, w) in zip(trackers, sums.outputs, strict=True):
            logs[tracker.name] = float(t / w if w else t / rows)
        return logs | keras_compat.metric_results(self.model, sums.metrics)
