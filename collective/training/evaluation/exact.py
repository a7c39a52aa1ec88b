"""Loss and metrics over a data set, exact whatever the number of replicas.

Every replica adds up its rows; sums are divided once, at the end. Nothing is padded
and no average is averaged. ``BatchwiseEvaluation`` says which batches there are, and
which hooks of callbacks; ``custom_step.evaluation`` has another subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from collective import recorder
from collective.backends.base import Backend
from collective.errors import UsageError
from collective.log import log
from collective.training import interrupts, keras_compat
from collective.training.input.batches import Batches
from collective.training.input.feed import ENDLESS
from collective.training.input.pipeline import Batch, Input
from collective.training.loop.callbacks import BatchHooks, Hooks
from collective.training.prepared import PreparedModel
from collective.training.step.accumulation import accumulate
from collective.training.step.draws import Draws
from collective.training.step.forward import Forward, Sums
from collective.training.step.found import Found
from collective.training.step.inputs import (
    ReplicaRows,
    Weights,
    read_weights,
    replica_rows,
    weight_specs,
)
from collective.training.step.metric_state import MetricState
from collective.training.step.passes import TracedPass
from collective.training.step.plan import StepPlan
from collective.training.step.report import cut
from collective.training.step.rows import rows_of, without_none
from collective.training.traced import traced


class BatchwiseEvaluation(ABC):
    """Evaluates a model on batches in order, ``steps`` at most, sharded over replicas."""

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
            interrupts.check()
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
                "there are not rows to evaluate",
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


class TestSums:
    """Sums over a replica's rows in inference mode."""

    # Whether a graph with these sums has the number of replicas in it.
    counts_replicas = False
    # Values of metrics that continue from batch to batch, where they are not sums over
    # rows.
    metrics: MetricState | None = None

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        spec: Batch,
        plan: StepPlan | None = None,
    ):
        rows = spec.global_rows
        signature = weight_specs(prepared), rows_of(spec), rows, rows
        draws, pieces = Draws(prepared), pieces_of(backend)
        forward = Forward(prepared, draws, pieces, plan=plan)
        self._pass = TracedPass(forward.test, signature)
        warn_of_dropped(self._pass.found, backend)

    def __call__(
        self, weights: Weights, own: ReplicaRows, global_rows: Any, metrics: tf.Tensor
    ) -> tuple[Sums, Found]:
        """Inside ``Backend.run``: the sums; all zero where a replica has no rows."""
        sums = accumulate(
            lambda _, __, rows: self._pass.function(
                weights, rows, global_rows, own.first
            ),
            self._pass.shapes,
            own.count,
            own.rows,
            micro_batches=1,
            maybe_empty=True,
        )
        return sums, self._pass.found


def pieces_of(backend: Backend) -> tuple[int, int]:
    """Into how many pieces a batch is cut."""
    return backend.most_replicas if backend.synchronous else 1, 1


def warn_of_dropped(found: Found, backend: Backend) -> None:
    """Names what the model assigns in validation, too."""
    if found.dropped and backend.rank == 0:
        log.warning(
            "a layer assigns %r in validation, too, which leaves the model as it is",
            found.dropped[0],
        )


class Evaluation(BatchwiseEvaluation):
    """Loss and metrics of a compiled model.

    Args:
        sums: The sums over a replica's rows; by default ``TestSums``. With others, loss
            and metrics may be those of whole batches; then the result depends on the
            size of these, as in Keras.
        plan: How ``TestSums`` computes the loss.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        backend: Backend,
        inputs: Input | Batches,
        steps: int | None = None,
        sums: TestSums | None = None,
        plan: StepPlan | None = None,
    ):
        super().__init__(prepared, backend, inputs, steps)
        spec = without_none(self.input.spec)
        self._sums = sums or TestSums(prepared, backend, spec, plan)
        self._metric_state = self._sums.metrics
        self._shapes: Sums
        self._signature = spec, tf.TensorSpec([None], tf.float64)
        self._runs: dict[int, Any] = {}  # with collectives, by the number of replicas

    @property
    def _run(self) -> Any:
        replicas = self.backend.replicas if self._sums.counts_replicas else 0
        if replicas not in self._runs:
            self._runs[replicas] = traced(
                lambda batch, metrics: self.backend.run(
                    self._replica, (batch, metrics)
                ),
                input_signature=self._signature,
            )
        return self._runs[replicas]

    def _vector(self, batch: Batch, number: int, before: Any) -> Any:
        """Sums over one global batch."""
        state = self._metric_state
        if state is None:
            metrics = tf.zeros([0], tf.float64)
        else:
            metrics = state.reset() if before is None else state.end_of(before)
        return self.backend.call(self._run, (without_none(batch), metrics))

    def _result(self, vectors: list[Any]) -> dict[str, float]:
        total = self._total(vectors)
        sums, loss = self._unpacked(total), self._loss(total)
        if sums.weights:
            # Keras' mean over batches by their rows, each divided by its own weight.
            parts = [(v[0], self._loss(v)) for v in (v.numpy() for v in vectors)]
            loss = float(sum(rows * loss for rows, loss in parts) / total[0])
        logs = {"loss": loss} | keras_compat.metric_results(self.model, sums.metrics)
        keras_compat.write_metrics(self.model, sums.metrics, loss, total[0])
        if keras_compat.loss_trackers(self.model) and vectors:
            # Keras' means over batches, however many rows they have.
            by_batch = [self._output_losses(vector.numpy()) for vector in vectors]
            for name in by_batch[0]:
                logs[name] = float(np.mean([losses[name] for losses in by_batch]))
        return logs

    def _total(self, vectors: list[Any]) -> np.ndarray:
        """The sum of the vectors; metrics of whole batches are those of the last one."""
        total = np.sum([vector.numpy() for vector in vectors], axis=0)
        if self._metric_state is not None:
            self._metric_state.end_of(total)[:] = self._metric_state.end_of(
                vectors[-1].numpy()
            )
        return total

    def _replica(self, batch: Batch, metrics: tf.Tensor) -> tf.Tensor:
        """Sums over one global batch as a vector; all but the metrics times rows."""
        replica = tf.cast(self.backend.replica(), tf.int64)
        own = replica_rows(self.backend, batch, replica)
        weights = read_weights(self.prepared)
        sums, found = self._sums(weights, own, batch.global_rows, metrics)
        self._shapes = tf.nest.map_structure(tf.TensorSpec.from_tensor, sums)
        found.seeds.advance(self.backend.assign)
        count = tf.cast(batch.global_rows, tf.float64)
        values = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in sums.metrics]
        others = [
            tf.reshape(tf.cast(t, tf.float64) * count, [1])
            for t in tf.nest.flatten(sums._replace(metrics=[]))
        ]
        local = tf.concat([tf.cast([own.count], tf.float64), *others, *values], axis=0)
        return self.backend.all_reduce([local])[0]

    def _loss(self, vector: np.ndarray) -> float:
        """The loss of the rows of a vector."""
        rows, sums = vector[0], self._unpacked(vector)
        planned, *weighed = sums.losses
        pairs = zip(weighed, sums.weights, strict=True)
        return float(planned / rows + sum(t / w if w else 0.0 for t, w in pairs))

    def _output_losses(self, vector: np.ndarray) -> dict[str, float]:
        """The losses of single outputs, over one batch."""
        trackers = keras_compat.loss_trackers(self.model)
        outputs = self._unpacked(vector).outputs
        return {
            tracker.name: float(t / w if w else t / vector[0])
            for tracker, (t, w) in zip(trackers, outputs, strict=True)
        }

    def _unpacked(self, vector: np.ndarray) -> Sums:
        arrays = cut(vector[1:], (s.shape for s in tf.nest.flatten(self._shapes)))
        return tf.nest.pack_sequence_as(self._shapes, arrays)
