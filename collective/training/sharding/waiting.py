"""A weight or slot that waits for its value, until it is known how it is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from collective.training import keras_compat
from collective.training.keras_compat.held_parts import StandIn
from collective.training.sharding.held import is_searching


@dataclass
class Owner:
    """What a variable is made for.

    Attributes:
        kind: ``weight`` of a layer, ``slot`` of an optimizer.
        gates: Of a weight; see ``gates_of``.
        weight: The variable that a slot belongs to, or None.
    """

    kind: str
    gates: int = 1
    weight: Any = None


class Waiting:
    """What holds a variable that has no value yet; see ``keras_compat.held_parts.Holder``.

    Code that runs eagerly reads the value that the variable will begin with, and may assign
    another. A function that reads the variable, or records gradients of it, needs it at
    once: it is an ordinary variable from then on.

    Args:
        value: A tensor, or a function that makes one.
    """

    def __init__(self, variable: Any, shape: tuple[int, ...], value: Any, owner: Owner):
        self.path, self.owner = keras_compat.model.path_of(variable), owner
        self._variable, self._first = variable, value
        self._value: tf.Tensor | None = None
        dtype = tf.as_dtype(variable.dtype)
        stand_in = StandIn(shape, dtype, variable.trainable, self)
        keras_compat.held_parts.hold(variable, stand_in)

    def whole(self) -> tf.Tensor:
        """Return the value; it is kept from now on."""
        if keras_compat.calls.records_gradients():
            return self._begun().value()
        if self._value is None:
            first = keras_compat.held_parts.first_value(self._variable, self._first)
            self._value = first
        return self._value

    def write(self, value: tf.Tensor) -> None:
        """Take another value."""
        self._value = value

    def traced_handle(self, own: Any) -> Any:
        """Return the handle of an ordinary variable, or of the stand-in to a search."""
        return own if is_searching() else self._begun().handle

    def _begun(self) -> tf.Variable:
        """Make the variable an ordinary one, if it is not; return TensorFlow's."""
        with tf.init_scope():
            if waits(self._variable) is self:
                value, self._value = self._value, None
                if value is None:
                    make = keras_compat.held_parts.first_value
                    value = make(self._variable, self._first)
                keras_compat.held_parts.make_whole(self._variable, value)
        return keras_compat.model.tf_variable(self._variable)


def waits(variable: Any) -> Waiting | None:
    """Return what holds a variable that has no value yet, or None if it has one."""
    holder = keras_compat.held_parts.holder_of(variable)
    return holder if isinstance(holder, Waiting) else None
