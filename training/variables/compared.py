"""Which variables make two ranks the same."""

from __future__ import annotations

import keras

from collective.backends.base import Backend
from collective.training import keras_compat
from collective.training.prepared import get_partition, get_prepared
from collective.training.variables import outside_variables


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Weights, layer state and optimizer state.

    Of a model with its own ``train_step``, the state of all optimizers that it holds.
    """
    prepared = get_prepared(model)
    optimizers = [model.optimizer]
    if keras_compat.overrides(model, "train_step"):
        optimizers += keras_compat.other_optimizers(model)
    return [
        *prepared.trainable,
        *prepared.state,
        *(v for optimizer in optimizers for v in optimizer.variables),
    ]


def replicated_variables(model: keras.Model) -> list[keras.Variable]:
    """Those of ``all_variables`` that every rank holds whole."""
    parts = get_partition(model)
    return [
        v for v in all_variables(model) if parts is None or parts.shape_of(v) is None
    ]


def broadcast_model(model: keras.Model, backend: Backend) -> None:
    """Gives every rank rank 0's model. Every rank calls it.

    One variable at a time, so that no rank holds the whole model twice.
    """
    backend.broadcast([*replicated_variables(model), *outside_variables.found(model)])
    parts = get_partition(model)
    if parts is not None:
        parts.broadcast_shards()
