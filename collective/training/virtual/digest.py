"""The SHA-256 of a model's state, to compare trainings by."""

from __future__ import annotations

import hashlib

import keras
import numpy as np
import tensorflow as tf

from collective.training import keras_compat
from collective.training.observers.checkpoint.state import Gathered, values_of
from collective.training.variables import all_variables


def state_sha256(model: keras.Model, gathered: Gathered | None = None) -> str:
    """The digest of weights, layer state and optimizer state, in 64 hexadecimal digits.

    Of each variable, in the order of ``all_variables``: dtype, shape and bytes. Names do
    not count: Keras numbers them by how many layers a process has made. Seeds of random
    layers do not count: a training leaves them as they are, and ``model.save`` does not
    write those of every layer.

    Args:
        gathered: Whole variables of which ranks have shards. Without them, a rank's
            digest is that of its own shards.
    """
    digest = hashlib.sha256()
    values = values_of(model, gathered=gathered)
    for variable, value in zip(all_variables(model), values, strict=True):
        if keras_compat.is_seed_state(variable):
            continue
        about = f"{tf.as_dtype(value.dtype).name}{list(value.shape)};"
        digest.update(about.encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
