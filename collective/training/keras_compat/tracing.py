"""What is taken from a model's own step while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from collective.replacements import replacing


@contextlib.contextmanager
def loss_of_step(model: keras.Model) -> Iterator[list[tf.Tensor]]:
    """Inside, collects the losses that the model's step tracks: those of its batch alone.

    What a step returns as ``loss`` is the mean since the metrics were last reset.
    """
    found: list[tf.Tensor] = []
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is None:
        yield found
        return
    update = tracker.update_state

    def noting(values: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(tf.convert_to_tensor(values))
        return update(values, *args, **kwargs)

    with replacing(tracker, "update_state", noting):
        yield found
