"""A Keras model: how its variables are made, and which methods its user overrides."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from collective.errors import CollectiveError
from collective.training.keras_compat.optimizers import (
    core_optimizer,
    flatten_partitioned,
)


def build(
    model: keras.Model, spec: tuple[Any, Any, Any], optimizer: bool = True
) -> None:
    """Creates every variable of model, loss, metrics and optimizer.

    Args:
        model: A compiled model, in its backend's scope.
        spec: ``(x, y, sample_weight)``, trees of ``tf.TensorSpec`` of one batch.
        optimizer: Whether the optimizer's are made, too.

    Raises:
        ValueError: Model, loss or metrics do not fit the data.
    """

    def symbolic(leaf: tf.TensorSpec) -> keras.KerasTensor:
        return keras.KerasTensor(tuple(leaf.shape), leaf.dtype.name)

    x, y, sample_weight = (
        None if part is None else tf.nest.map_structure(symbolic, part) for part in spec
    )
    batch = (x, y) if sample_weight is None else (x, y, sample_weight)
    core = core_optimizer(model.optimizer)
    build_core = core.build
    built = model.optimizer.built
    model.optimizer.built = built or not optimizer
    try:
        with mock.patch.object(
            core, "build", lambda v: build_core(flatten_partitioned(v))
        ):
            model._symbolic_build(data_batch=batch)
    finally:
        model.optimizer.built = built or optimizer


def call(model: keras.Model, x: Any, training: bool) -> Any:
    """The model's predictions, with ``training`` where its ``call`` takes it.

    Raises:
        CollectiveError: As it was raised in a layer, without Keras' words around it.
    """
    try:
        return model(x, training=training) if takes_training(model) else model(x)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, CollectiveError):
            cause = cause.__context__
        if cause is None:
            raise
        raise cause from None


def takes_training(model: keras.Model) -> bool:
    """Whether the model's ``call`` has a ``training`` argument."""
    return bool(model._call_has_training_arg)


def tf_variable(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable behind a Keras one."""
    return variable.value


def overrides(model: keras.Model, method: str) -> bool:
    """Whether the user's class replaces a method of ``keras.Model``."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def move_variable(variable: keras.Variable, device: str) -> None:
    """Puts a variable on another device; references to the Keras variable stay valid."""
    with tf.init_scope(), tf.device(device):
        variable._initialize(tf.identity(variable.value))
