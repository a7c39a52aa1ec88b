"""Keras' own training and test step on some rows, without touching a variable.

The lines of ``keras.Model.train_step`` and ``test_step``, up to the optimizer, inside a
``StatelessScope``: the reference that our step is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.replacements import replacing
from collective.training.input.leaves import count_rows, first_leaf
from collective.training.keras_compat.layers import mask_of, set_mask
from collective.training.keras_compat.losses import whole_losses
from collective.training.keras_compat.model import takes_training
from collective.training.keras_compat.randomness import is_seed_state
from collective.training.keras_compat.stateless_metrics import (
    metric_variables,
    numbers,
)
from collective.training.keras_compat.wrapped_functions import (
    ReadingScope,
    read_as_variables,
    require_variable,
)


@dataclass
class StepOutcome:
    """What a training or test step on some rows computes."""

    # Under Keras' names: the loss, those of single outputs, the metrics.
    logs: dict[str, Any] = field(default_factory=dict)
    # Of each trainable variable, before the optimizer; None where the loss does not
    # depend on it. Empty for a test step.
    gradients: list[np.ndarray | None] = field(default_factory=list)
    # The new value of each non-trainable variable.
    state: list[np.ndarray] = field(default_factory=list)
    predictions: list[np.ndarray] = field(default_factory=list)
    # By index, the new values of trainable variables that layers assign.
    weights: dict[int, np.ndarray] = field(default_factory=dict)
    # Names of variables that are written and are none of the model's.
    outside: list[str] = field(default_factory=list)
    added: float = 0.0  # the sum of the losses from ``add_loss`` and regularizers
    adding: list[str] = field(default_factory=list)
    # Each of them, for each piece of the rows.
    terms: list[list[float]] = field(default_factory=list)
    # The gradients of what ``between`` gave, times the scale of the loss.
    of_between: list[Any] = field(default_factory=list)


class _Values(ReadingScope):
    """Values of variables, as reads and writes of real variables would have them.

    A gradient does not pass through a write, and that of a variable is the sum over all
    values that were read of it.
    """

    def __init__(
        self,
        trainable: Sequence[keras.Variable],
        state: Sequence[keras.Variable],
        tape: tf.GradientTape,
    ):
        known = [*trainable, *state]
        with tape.stop_recording():  # of a variable that is also read as such
            self.start = {id(v): tf.convert_to_tensor(v) for v in known}
        self.tape = tape
        self.versions = {id(v): [self.start[id(v)]] for v in trainable}
        self.written: dict[int, keras.Variable] = {}
        for (value,) in self.versions.values():
            tape.watch(value)
        super().__init__([(v, self.start[id(v)]) for v in known], collect_losses=True)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """A write."""
        variable, value = update
        value = tf.stop_gradient(tf.convert_to_tensor(value))
        if id(variable) in self.versions:
            self.tape.watch(value)
            self.versions[id(variable)].append(value)
        self.written[id(variable)] = variable
        super().add_update((variable, value))

    def get_current_value(self, variable: keras.Variable) -> Any:
        """What reading a variable calls; see ``wrapped_functions``."""
        known = id(variable) in self.start and not is_seed_state(variable)
        if self.reads_variables and known:
            if id(variable) in self.versions:
                require_variable(variable, id(variable) in self.written)
            return None
        return super().get_current_value(variable)

    def rewind(self) -> None:
        """Gives the model's variables their first values again."""
        self.state_mapping.update(self.start)


def stock_step(
    model: keras.Model,
    trainable: Sequence[keras.Variable],
    state: Sequence[keras.Variable],
    batch: tuple[Any, Any, Any],
    *,
    training: bool,
    loss_scale: float = 1.0,
    pieces: Sequence[tuple[Any, float]] = (),
    sums: Collection[int] = (),
    between: Callable[[], list[Any]] = list,
) -> StepOutcome:
    """Keras' own step on some rows.

    Args:
        trainable, state: Its trainable variables, and all others.
        batch: ``x, y, sample_weight``; None for what is absent.
        loss_scale: The loss is multiplied by it before differentiation, and gradients
            are divided by it.
        pieces: ``(x, share of the rows)`` of consecutive rows. The model is then called
            for each of them, and the loss and the metrics see the predictions of all.
        sums: Places of added losses that are sums over rows.
        between: Gives, after the forward pass, tensors of it whose gradients are wanted.
    """
    x = batch[0]
    with whole_losses(), tf.GradientTape() as tape:
        values = _Values(trainable, state, tape)
        with values:
            model.reset_metrics()
            y_pred, terms = _call(model, x, pieces, training, values)
            added = _over_pieces(terms, pieces, sums)
            layers = model._flatten_layers()
            adding = [layer.name for layer in layers if layer._get_own_losses()]
            loss, metrics = _judged(model, batch, y_pred, added, pieces, training)
            scaled = tf.cast(loss, tf.float64) * loss_scale
            logs = numbers(metrics)
    gradients: list[np.ndarray | None] = []
    of_between: list[Any] = []
    if training:
        versions = [values.versions[id(v)] for v in trainable]
        for place, variable in read_as_variables(tape, trainable):
            versions[place].append(variable)
        found, of_between = tape.gradient(scaled, (versions, between()))
        gradients = _dense_sums(found, loss_scale)
    own = {id(v) for v in [*trainable, *state, *metric_variables(model)]}
    return StepOutcome(
        logs=logs,
        gradients=gradients,
        state=[np.asarray(values.get_current_value(v)) for v in state],
        predictions=[np.asarray(t) for t in tf.nest.flatten(y_pred)],
        weights={
            i: np.asarray(values.get_current_value(v))
            for i, v in enumerate(trainable)
            if id(v) in values.written
        },
        outside=[
            v.path
            for i, v in values.written.items()
            if i not in own and not is_seed_state(v)
        ],
        added=float(sum(tf.reduce_sum(tf.cast(v, tf.float64)) for v in added)),
        adding=adding,
        of_between=of_between,
        terms=[[float(tf.reduce_sum(v)) for v in term] for term in terms],
    )


def _judged(
    model: keras.Model,
    batch: tuple[Any, Any, Any],
    y_pred: Any,
    added: list[Any],
    pieces: Sequence[tuple[Any, float]],
    training: bool,
) -> tuple[Any, dict[str, Any]]:
    """Loss and metrics of predictions, inside a scope."""
    x, y, sample_weight = batch
    # An empty list leaves ``model.losses`` as they are.
    with replacing(model, "_losses_override", added if pieces else []):
        parts = dict(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        loss = model._compute_loss(**parts, training=training)
    count = count_rows(first_leaf(x))
    model._loss_tracker.update_state(loss, sample_weight=count)
    return loss, model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def stock_tensors(
    model: keras.Model,
    trainable: Sequence[keras.Variable],
    state: Sequence[keras.Variable],
    batch: tuple[Any, Any, Any],
    *,
    training: bool,
) -> list[Any]:
    """Predictions, loss and metrics of Keras' own step, and what it assigns.

    To be traced: writes no variable. Arguments as of ``stock_step``.
    """
    with whole_losses(), tf.GradientTape() as tape:
        values = _Values(trainable, state, tape)
        with values:
            model.reset_metrics()
            y_pred, terms = _call(model, batch[0], (), training, values)
            added = _over_pieces(terms, (), ())
            found = _judged(model, batch, y_pred, added, (), training)
    written = [values.get_current_value(v) for v in values.written.values()]
    return [t for t in tf.nest.flatten([y_pred, found, written]) if t is not None]


def _call(
    model: keras.Model,
    x: Any,
    pieces: Sequence[tuple[Any, float]],
    training: bool,
    values: _Values,
) -> tuple[Any, list[Any]]:
    """Predictions for all rows, and of each added loss its value in each piece."""
    argument = {"training": training} if takes_training(model) else {}
    if not pieces:
        return model(x, **argument), [[loss] for loss in model.losses]
    predictions, losses = [], []
    for rows, _ in pieces:
        values.rewind()
        predictions.append(model(rows, **argument))
        losses.append(list(model.losses))
    joined = tf.nest.map_structure(_joined, *predictions)
    return joined, [list(parts) for parts in zip(*losses, strict=True)]


def _over_pieces(
    terms: list[list[Any]], pieces: Sequence[tuple[Any, float]], sums: Collection[int]
) -> list[Any]:
    """Each added loss of all pieces together: their mean by rows, or their sum."""
    if not pieces:
        return [value for (value,) in terms]
    return [
        tf.add_n(
            [
                value * tf.cast(1.0 if place in sums else share, value.dtype)
                for value, (_, share) in zip(values, pieces, strict=True)
            ]
        )
        for place, values in enumerate(terms)
    ]


def _joined(*tensors: Any) -> tf.Tensor:
    """Predictions of consecutive rows in one tensor, with their masks."""
    joined = tf.concat(tensors, axis=0)
    masks = [mask_of(t) for t in tensors]
    if all(mask is not None for mask in masks):
        set_mask(joined, tf.concat(masks, axis=0))
    return joined


def _dense_sums(
    gradients: list[list[Any]], loss_scale: float
) -> list[np.ndarray | None]:
    """The gradient of each trainable variable, from those of all values that it had."""
    found = []
    for parts in gradients:
        dense = [
            tf.cast(tf.convert_to_tensor(g), tf.float64) for g in parts if g is not None
        ]
        found.append(tf.add_n(dense).numpy() / loss_scale if dense else None)
    return found


def loss_names(model: keras.Model) -> list[str]:
    """What the user calls the compiled losses."""
    losses = tf.nest.flatten(model.loss) if model.loss is not None else []
    return [
        str(getattr(loss, "name", None) or getattr(loss, "__name__", loss))
        for loss in losses
        if loss is not None
    ]
