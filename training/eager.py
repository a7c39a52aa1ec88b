"""Models compiled with ``run_eagerly=True``.

A model is traced once, as any other, to learn the shapes of its sums. The steps then run
operation by operation, on each rank: Python code of the model runs in every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from collective.errors import UsageError


@contextlib.contextmanager
def runs_eagerly(model: keras.Model) -> Iterator[None]:
    """Has TensorFlow run functions eagerly, if the model wants it."""
    before = tf.config.functions_run_eagerly()
    if not model.run_eagerly or before:
        yield
        return
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def refusal(model: keras.Model, error: Exception) -> UsageError:
    """The error for a model that wants to run eagerly, and cannot be traced."""
    first = str(error).strip().split("\n")[0]
    return UsageError(
        f"model {model.name!r} has run_eagerly=True, and it cannot be traced even once: "
        f"{type(error).__name__}: {first}"[:500],
        hint="collective traces a model to learn the shapes of its sums, and then runs "
        "it eagerly: leave .numpy() and Python's if over tensors out of its code; or "
        "train it by model.fit with hvd.DistributedOptimizer "
        "(collective.tensorflow.keras)",
    )
