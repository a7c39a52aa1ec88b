"""What was traced for a model, kept until it is compiled again or has other variables."""

from __future__ import annotations

from typing import Any

import keras

from collective.training import keras_compat
from collective.training.keras_compat.traced import kept_with
from collective.training.model.variables import optimizers_of


def kept_as_compiled(model: keras.Model, what: str) -> dict[Any, Any]:
    """Return what was traced for a model as it is compiled now, by its use.

    Args:
        what: Part of the name of the attribute that keeps it; see ``kept_with``.
    """
    optimizers = optimizers_of(model) if model.compiled else []
    compiled = [
        *optimizers,
        *keras_compat.model.compiled_objects(model),
        *model.variables,
        *model.metrics_variables,
        *(v for optimizer in optimizers for v in optimizer.variables),
    ]
    # A variable may be cut after it was made.
    compiled += [keras_compat.held_parts.holder_of(v) for v in compiled]
    flags = [layer.trainable for layer in keras_compat.model.layers_of(model)]
    return kept_with(model, what, compiled, flags)
