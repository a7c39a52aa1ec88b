"""Our step on some rows, in pieces of uneven size: what as many replicas would compute.

Everything is the step's own code, but for the all-reduce, which is an addition here, and
the optimizer, which does not run. The model's own variables are not written: they have
values in a scope of Keras.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.training.input.leaves import count_rows
from collective.training.keras_compat import StepOutcome
from collective.training.prepared import PreparedModel
from collective.training.step import layer_state
from collective.training.step.draws import Draws
from collective.training.step.forward import Forward, Sums, global_loss
from collective.training.step.found import Found
from collective.training.step.inputs import Weights, read_weights
from collective.training.step.plan import StepPlan
from collective.training.step.report import Averages, Layout
from collective.training.step.rows import Rows, or_none
from collective.training.step.update import (
    KerasUpdate,
    assign_state,
    global_gradients,
)
from collective.training.undone_writes import undo_writes as undo_writes
from collective.training.verification.first_rows import cut


class Untraced:
    """Our step, run eagerly on a few rows at a time, which no replica shares.

    To trace a large model takes longer than to run it a few times.

    Args:
        draws: How it draws random numbers; by default as in Keras.
    """

    def __init__(
        self, prepared: PreparedModel, backend: Backend, draws: Draws | None = None
    ):
        self.prepared = prepared
        self.model = prepared.model
        # The most look-ups of a row so far, by variable; see ``Found.counted``.
        self.counted: dict[int, int] = {}
        self.backend = backend
        self.plan = StepPlan()  # says which values of ``add_loss`` are sums over rows
        self._draws = draws or Draws(prepared)
        self._layout = Layout(prepared.model)

    def train(self, rows: Rows, sizes: Sequence[int], loss_scale: float) -> StepOutcome:
        """A training step up to the optimizer.

        Args:
            rows: ``[n, ...]``.
            sizes: Rows of the pieces; their sum is n.
            loss_scale: As for ``stock_step``.
        """
        weights = read_weights(self.prepared)
        sums, found = self._sums(weights, rows, sizes, loss_scale)
        gradients: list[np.ndarray | None] = [None] * len(weights.trainable)
        pairs = zip(*global_gradients(sums, found, self.prepared), strict=True)
        for gradient, i in pairs:
            gradients[i] = gradient.numpy().astype(np.float64) / loss_scale
        state, assigned = list(weights.state), {}
        changes = iter(sums.state)
        for i in found.changing:
            state[i] = layer_state.updated(state[i], next(changes))
        for i in found.assigned:
            total = next(changes)
            assigned[i] = layer_state.updated(weights.trainable[i], total).numpy()
        return StepOutcome(
            logs=self._logs(sums, sum(sizes)),
            gradients=gradients,
            state=[value.numpy() for value in state],
            weights=assigned,
        )

    def test(self, rows: Rows, sizes: Sequence[int]) -> StepOutcome:
        """A test step: the logs only; otherwise as ``train``."""
        count = tf.constant(sum(sizes), tf.int64)
        weights = read_weights(self.prepared)
        starts = tf.constant(np.cumsum([0, *sizes]), tf.int64)
        forward = self._forward(sizes)
        parts = [
            forward.test(weights, piece, count, start)[0]
            for piece, start in zip(cut(rows, sizes), starts, strict=False)
        ]
        return StepOutcome(logs=self._logs(_added(parts), sum(sizes)))

    def apply(self, rows: Rows, sizes: Sequence[int]) -> None:
        """A whole step, which writes the variables: sums of pieces, then the update."""
        prepared, backend = self.prepared, self.backend
        weights = read_weights(prepared)
        sums, found = self._sums(weights, rows, sizes, 1.0)
        gradients, indices = global_gradients(sums, found, prepared)
        assign_state(sums.state, found, prepared, weights, backend)
        KerasUpdate(prepared, backend).apply(gradients, indices)

    def _forward(self, sizes: Sequence[int]) -> Forward:
        return Forward(self.prepared, self._draws, (len(sizes), 1), plan=self.plan)

    def _sums(
        self, weights: Weights, rows: Rows, sizes: Sequence[int], loss_scale: float
    ) -> tuple[Sums, Found]:
        """The sums over all pieces, and what the last one has found."""
        count = tf.constant(sum(sizes), tf.int64)
        scale = tf.constant(loss_scale, tf.float32)
        starts = np.cumsum([0, *sizes])
        forward, parts = self._forward(sizes), []
        for replica, piece in enumerate(cut(rows, sizes)):
            position = tf.constant([0, replica, 0, starts[replica]], tf.int64)
            sums, found = forward.train(weights, piece, count, scale, position)
            parts.append(sums)
            for i, number in found.counted.items():
                self.counted[i] = max(number, self.counted.get(i, 0))
        return _added(parts), found

    def _logs(self, sums: Sums, count: int) -> dict[str, Any]:
        """What the user would see of one such step."""
        loss, outputs = global_loss(sums)
        rows = tf.constant(count, tf.int64)
        report = self._layout.pack(loss, rows, (0.0, 0.0), outputs, sums.metrics)
        averages = Averages(self._layout)
        averages.add(report)
        return averages.logs()


def _added(parts: Sequence[Sums]) -> Sums:
    return functools.reduce(lambda a, b: tf.nest.map_structure(tf.add, a, b), parts)


def predict_in_pieces(model: keras.Model, data: Any, sizes: Sequence[int]) -> Any:
    """What ``predict_step`` gives for pieces, joined; None where there is not one a row.

    Args:
        data: ``Rows``, of which a model may take x only.
    """
    parts = [model.predict_step(packed(piece)) for piece in cut(data, sizes)]
    leaves = [tf.nest.flatten(part) for part in parts]
    for part, size in zip(leaves, sizes, strict=True):
        if any(not t.shape.rank or int(count_rows(t)) != size for t in part):
            return None
    return [tf.concat(column, axis=0) for column in zip(*leaves, strict=True)]


def packed(rows: Rows) -> Any:
    """The ``data`` of a step, as Keras gives them."""
    return keras.utils.pack_x_y_sample_weight(*map(or_none, rows))
