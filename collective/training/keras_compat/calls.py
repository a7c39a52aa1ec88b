"""Calls that optimizers and ``tf.function`` get: to note them, and to know whose they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from collective.replacements import replacing
from collective.training.keras_compat.optimizers import (
    core_optimizer,
)

# Functions of these packages are not the user's: they are left as they are.
_LIBRARIES = ("tensorflow", "keras", "collective")


@contextlib.contextmanager
def record_applied(
    applied: list[tuple[str, keras.Optimizer, list[Any], list[Any]]],
    update: bool = True,
) -> Iterator[None]:
    """Inside, notes what reaches optimizers: name, optimizer, gradients, variables.

    Of the replicas of this process, at the first one.
    """
    original = BaseOptimizer.apply

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = _applied_to(self, trainable_variables)
        if is_first_replica():
            # Where replicas meet, as in a LossScaleOptimizer, a gradient is those of all.
            copies = tf.distribute.get_strategy().experimental_local_results
            own = [copies(gradient)[0] for gradient in grads]
            applied.append((self.name, self, own, variables))
        return original(self, grads, trainable_variables) if update else None

    with replacing(BaseOptimizer, "apply", apply):
        yield


def is_first_replica() -> bool:
    """Whether this is the first replica of this process, or where its replicas meet."""
    replica = tf.distribute.get_replica_context()
    return replica is None or (
        tf.get_static_value(replica.replica_id_in_sync_group) == 0
    )


def is_trained(source: Any) -> bool:
    """Whether something is a variable that training changes."""
    is_variable = isinstance(source, keras.Variable | tf.Variable)
    return is_variable and bool(source.trainable)


def function_class() -> type[Any]:
    """The class of what ``tf.function`` returns."""
    return polymorphic_function.Function


def is_users(function: Any) -> bool:
    """Whether a ``tf.function`` is of a user's own code."""
    body = function.python_function
    return (getattr(body, "__module__", None) or "").split(".")[0] not in _LIBRARIES


def computes_batches(function: Any) -> bool:
    """Whether a ``tf.function`` is of a user's own code, or a step of a Keras model."""
    module = getattr(function.python_function, "__module__", None) or ""
    return is_users(function) or module == "keras.src.backend.tensorflow.trainer"


def _applied_to(optimizer: Any, variables: Any) -> list[Any]:
    """The variables that ``apply`` was given, or those the optimizer was built for."""
    if variables is None:
        variables = core_optimizer(optimizer)._trainable_variables
    return list(variables)
