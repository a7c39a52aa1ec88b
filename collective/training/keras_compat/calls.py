"""Calls of gradient tapes and of ``tf.function``: records them, and knows whose they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from collective.replacements import replacing

# Functions of these packages are not the user's: they are left as they are.
_LIBRARIES = ("tensorflow", "keras", "collective")


def is_trained(source: Any) -> bool:
    """Return whether something is a variable that training changes."""
    is_variable = isinstance(source, keras.Variable | tf.Variable)
    return is_variable and bool(source.trainable)


def function_class() -> type[Any]:
    """Return the class of the objects that ``tf.function`` makes."""
    return polymorphic_function.Function


def is_users(function: Any) -> bool:
    """Return whether a ``tf.function`` is of a user's own code."""
    body = function.python_function
    return (getattr(body, "__module__", None) or "").split(".")[0] not in _LIBRARIES


def computes_batches(function: Any) -> bool:
    """Return whether a ``tf.function`` is a user's own, or a step of a Keras model."""
    module = getattr(function.python_function, "__module__", None) or ""
    return is_users(function) or module == "keras.src.backend.tensorflow.trainer"


def records_gradients() -> bool:
    """Return whether a tape of this thread records what is computed."""
    return bool(record.could_possibly_record())


@contextlib.contextmanager
def record_gradients(
    noted: list[tuple[tf.Variable | keras.Variable, tf.Tensor]],
) -> Iterator[None]:
    """Record gradients of trained variables that are computed inside.

    Gradients that are differentiated again are left out.

    Args:
        noted: Each variable is added to it, with its gradient if that is dense.
    """
    original = tf.GradientTape.gradient

    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **more: Any) -> Any:
        result = original(tape, target, sources, *args, **more)
        if not record.could_possibly_record():
            pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(result), strict=True)
            noted.extend(
                (v, g) for v, g in pairs if is_trained(v) and isinstance(g, tf.Tensor)
            )
        return result

    with replacing(tf.GradientTape, "gradient", gradient):
        yield
