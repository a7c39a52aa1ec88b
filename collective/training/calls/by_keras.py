"""Which calls Keras' own methods serve."""

from __future__ import annotations

import os
import types
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.distribute.datasets import original
from collective.fit_options import FitOptions
from collective.training.calls.planned_data import has_rows_by_number
from collective.training.input.data import is_array_data
from collective.training.model.prepared import get_prepared
from collective.training.observers.checkpoint.schedule import Checkpoint


def serves(
    model: keras.Model,
    data: Any,
    backend: Backend,
    options: FitOptions | None = None,
    checkpoint: Checkpoint | None = None,
    ledger: str | os.PathLike[str] | None = None,
) -> bool:
    """Return whether Keras' own method can serve a call.

    Args:
        data: What was given as data to train on, to evaluate or to predict.
        options: Those of a training.
    """
    if not isinstance(model, keras.Model):
        return False
    prepared = get_prepared(model)
    if prepared.partition or prepared.placement:
        return False
    if checkpoint is not None and not _is_describable(data):
        return False
    return is_plain(backend)


def _is_describable(data: Any) -> bool:
    """Return whether a checkpoint can be told of data before Keras reads them."""
    kinds = tf.data.Dataset, keras.utils.PyDataset, types.GeneratorType
    data = original(data)
    return has_rows_by_number(data) or is_array_data(data) or isinstance(data, kinds)


def is_plain(backend: Backend) -> bool:
    """Return whether each device of a backend has a whole model."""
    return not (backend.tensor is not None or backend.stages)
