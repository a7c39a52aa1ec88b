"""Our step on some rows, in pieces of uneven size: what as many replicas would compute.

Everything is the step's own code, but for the all-reduce, which is an addition here, and
the optimizer, which does not run. The model's own variables are not written: they have
values in a scope of Keras. ``undo_writes`` takes back those to a user's ``tf.Variable``s.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from collective.training.input.leaves import count_rows
from collective.training.input.pipeline import Batch
from collective.training.keras_compat import StepOutcome
from collective.training.prepared import PreparedModel
from collective.training.step import layer_state
from collective.training.step.forward import Forward, Sums, global_loss
from collective.training.step.inputs import read_weights
from collective.training.step.report import Averages, Layout
from collective.training.step.rows import Rows, or_none
from collective.training.step.step import Step
from collective.training.verification.first_rows import cut

# Both define some of them.
_CLASSES = (
    resource_variable_ops.BaseResourceVariable,
    resource_variable_ops.ResourceVariable,
)
_WRITES = [
    (kind, name)
    for kind in _CLASSES
    for name in vars(kind)
    if name.startswith(("assign", "scatter_", "batch_scatter"))
]


class UntracedStep(Step):
    """A step whose functions run eagerly, a few rows at a time."""

    def _trace(self, spec: Batch, jit_compile: bool) -> None:
        """Nothing: to trace a large model takes longer than to run it a few times."""


class UntracedTest:
    """What of a step a test needs, of a model whose optimizer may not be built."""

    def __init__(self, prepared: PreparedModel):
        self.prepared = prepared
        self.model = prepared.model
        self.forward = Forward(prepared, None)
        self.layout = Layout(prepared.model)


def train_in_pieces(
    step: Step, rows: Rows, sizes: Sequence[int], loss_scale: float
) -> StepOutcome:
    """A training step up to the optimizer.

    Args:
        rows: ``[n, ...]``.
        sizes: Rows of the pieces; their sum is n.
        loss_scale: As for ``stock_step``.
    """
    count = tf.constant(sum(sizes), tf.int64)
    scale = tf.constant(loss_scale, tf.float32)
    forward = step.forward
    weights = read_weights(step.prepared)
    sums = _added(_sums_of_pieces(step, rows, sizes, count, scale))
    gradients: list[np.ndarray | None] = [None] * len(weights.trainable)
    for i, gradient in zip(forward.connected, step._divide(sums), strict=True):
        gradients[i] = gradient.numpy().astype(np.float64) / loss_scale
    for i, values in zip(forward.overwritten, sums.overwrites, strict=True):
        gradients[i] = tf.reduce_max(values, 0).numpy().astype(np.float64) / loss_scale
    state, assigned = list(weights.state), {}
    changes = iter(sums.state)
    for i in forward.changing:
        state[i] = layer_state.updated(state[i], next(changes))
    for i in forward.assigned:
        total = next(changes)
        assigned[i] = layer_state.updated(weights.trainable[i], total).numpy()
    return StepOutcome(
        logs=_logs(step, sums, count),
        gradients=gradients,
        state=[value.numpy() for value in state],
        weights=assigned,
    )


def _sums_of_pieces(
    step: Step, rows: Rows, sizes: Sequence[int], count: tf.Tensor, scale: tf.Tensor
) -> list[Sums]:
    weights = read_weights(step.prepared)
    step.forward.pieces = len(sizes), 1
    parts = []
    starts = np.cumsum([0, *sizes])
    for replica, piece in enumerate(cut(rows, sizes)):
        position = tf.constant([0, replica, 0, starts[replica]], tf.int64)
        parts.append(step.forward.train(weights, piece, count, scale, position))
    return parts


def test_in_pieces(
    step: Step | UntracedTest, rows: Rows, sizes: Sequence[int]
) -> StepOutcome:
    """A test step: the logs only; otherwise as ``train_in_pieces``."""
    count = tf.constant(sum(sizes), tf.int64)
    weights = read_weights(step.prepared)
    starts = tf.constant(np.cumsum([0, *sizes]), tf.int64)
    step.forward.pieces = len(sizes), 1
    parts = [
        step.forward.test(weights, piece, count, start)
        for piece, start in zip(cut(rows, sizes), starts, strict=False)
    ]
    return StepOutcome(logs=_logs(step, _added(parts), count))


def _added(parts: Sequence[Sums]) -> Sums:
    return functools.reduce(lambda a, b: tf.nest.map_structure(tf.add, a, b), parts)


def _logs(step: Step | UntracedTest, sums: Sums, count: tf.Tensor) -> dict[str, Any]:
    """What the user would see of one such step."""
    loss, outputs = global_loss(sums)
    report = step.layout.pack(loss, count, (0.0, 0.0), outputs, sums.metrics)
    averages = Averages(step.layout)
    averages.add(report)
    return averages.logs()


def apply_pieces(step: Step, rows: Rows, sizes: Sequence[int]) -> None:
    """A whole step, which writes the variables: sums of pieces, then the optimizer."""
    scale = tf.constant(1.0, tf.float32)
    count = tf.constant(sum(sizes), tf.int64)
    sums = _added(_sums_of_pieces(step, rows, sizes, count, scale))
    weights = read_weights(step.prepared)
    gradients = step._divide(sums)
    step._assign_state(weights, sums.state)
    step._apply(gradients, sums)


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


@contextlib.contextmanager
def undo_writes() -> Iterator[dict[str, Any]]:
    """Restores, at its end, every variable that was written inside.

    Yields:
        The names of the written variables, with their values before; it grows.
    """
    written: dict[int, tuple[Any, tf.Tensor]] = {}
    names: dict[str, Any] = {}

    def recording(method: Any) -> Any:
        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self) not in written:
                with tf.init_scope():
                    before = tf.identity(self)
                written[id(self)] = self, before
                names[self.name] = before
            return method(self, *args, **kwargs)

        return write

    try:
        with contextlib.ExitStack() as stack:
            for kind, name in _WRITES:
                method = recording(getattr(kind, name))
                stack.enter_context(mock.patch.object(kind, name, method))
            yield names
    finally:
        for variable, before in written.values():
            variable.assign(before)
