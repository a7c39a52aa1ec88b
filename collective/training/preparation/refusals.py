"""Refuses models and labels before the first step, on every rank alike."""

from __future__ import annotations

import keras

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.log import log
from collective.training import keras_compat
from collective.training.input.source import Source


def check_model(model: keras.Model, backend: Backend) -> None:
    """Refuse a model that the shared step cannot train as the user means it."""
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"a keras.Model was expected, not {type(model).__name__}",
            hint="collective.fit(model, x, y), the model compiled",
        )
    if not model.compiled or model.optimizer is None:
        raise UsageError(
            f"model {model.name!r} is not compiled",
            hint="model.compile(optimizer=..., loss=...) before collective.fit",
        )
    if keras_compat.model.overrides(model, "make_train_function"):
        raise UsageError(
            f"model {model.name!r} has a make_train_function of its own, which would be "
            "left out",
            hint="override train_step, or train it by python itself",
        )
    if keras_compat.distribution.distribution_ignored():
        log.warning(
            "Keras ignores the script's %s on TensorFlow. HINT: collectiverun -np N "
            "--keras script.py trains as it says",
            type(keras_compat.distribution.current_distribution()).__name__,
        )
    strategy = getattr(backend, "strategy", None)
    optimizer = keras_compat.optimizers.core_optimizer(model.optimizer)
    if strategy is not None and optimizer.gradient_accumulation_steps:
        raise UsageError(
            f"backend {backend.name!r} cannot run an optimizer that accumulates: a "
            "condition in an update is not possible in TensorFlow's strategies",
            hint="accumulate=K in place of gradient_accumulation_steps, or another backend",
        )
    if strategy is not None and model.distribute_strategy is not strategy:
        raise UsageError(
            f"model {model.name!r} was made outside the scope of backend "
            f"{backend.name!r}",
            hint="make and compile it in 'with backend.scope():', or give collective.fit "
            "a function that makes it",
        )


def check_labels(model: keras.Model, source: Source) -> None:
    """Refuse labels that sparse categorical cross-entropy cannot use."""
    bounds = source.label_range()
    loss = model.loss
    sparse = (
        isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
        or loss == "sparse_categorical_crossentropy"
    )
    shape = getattr(model, "output_shape", None)
    if not sparse or bounds is None or not isinstance(shape, tuple):
        return
    classes, (low, high) = shape[-1], bounds
    if low < 0 or high >= classes:
        raise UsageError(
            f"labels go from {low} to {high}, but model {model.name!r} has {classes} "
            f"outputs, for labels from 0 to {classes - 1}",
            hint="number the labels from 0, or give the model more outputs",
        )
