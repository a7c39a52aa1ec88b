"""What a model with its own step needs before it trains: data and variables."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError, first_line
from collective.training import compatibility, keras_compat
from collective.training.input.pipeline import Batch
from collective.training.step.rows import Rows, or_none, without_none


def packed(rows: Rows) -> Any:
    """The ``data`` of a step, as Keras' ``fit`` gives them.

    Floating-point rows have the precision that Keras converts arrays to.
    """
    dtype = keras.config.floatx()
    cast = tf.nest.map_structure(
        lambda t: tf.cast(t, dtype) if t.dtype.is_floating else t, rows
    )
    return keras.utils.pack_x_y_sample_weight(*map(or_none, cast))


class OnlyBuilds(keras_compat.Hooks):
    """Has a step apply nothing, and its optimizers built behind it.

    For replicas of one process, in which no optimizer could be built.
    """

    def __init__(self) -> None:
        self._applied: list[tuple[keras.Optimizer, Any]] = []

    def update(
        self, optimizer: keras.Optimizer, gradients: Any, variables: Any, apply: Any
    ) -> None:
        """Applies nothing."""
        self._applied.append((optimizer, variables))

    def build(self) -> None:
        """In the backend's scope: as the beginning of ``optimizer.apply``."""
        for optimizer, variables in self._applied:
            if not optimizer.built:
                with keras.name_scope(optimizer.name, caller=optimizer):
                    optimizer.build(variables)


def build(
    model: keras.Model, backend: Backend, spec: Batch, hooks: keras_compat.Hooks
) -> None:
    """Makes the variables of layers, metrics and optimizers, as Keras' ``fit`` does.

    Args:
        hooks: Those with which the step is traced for it.
    """
    x, y, weight, *_ = without_none(spec)

    def step(rows: Rows) -> None:
        made: Any = contextlib.nullcontext()
        if len(backend.local_replicas) > 1:
            made = keras_compat.variables_made_in(backend.scope)
        with made, keras_compat.intercept(hooks):
            model.train_step(packed(rows))

    run = tf.function(lambda rows: backend.run(step, (rows,)), autograph=False)
    try:
        with backend.scope():
            run.get_concrete_function(Rows(x, y, weight))
            if isinstance(hooks, OnlyBuilds):
                hooks.build()
    except UsageError:
        raise
    except Exception as error:
        first = first_line(error)
        raise UsageError(
            f"the train_step of model {model.name!r} cannot be traced with rows of these "
            f"data: {type(error).__name__}: {first}",
            hint="see whether model.fit runs it, with run_eagerly=False; or "
            + compatibility.FEATURES["own_step"].without,
        ) from error
