"""Undoes the writes of a piece of code to variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from collective.replacements import replacing


@contextlib.contextmanager
def undo_writes() -> Iterator[None]:
    """Restore, at the end, every variable that was read or written inside.

    All methods that write a variable ask for its handle first. A variable is identified by
    its handle, because ``assign`` returns a new object with the same handle.
    """
    before: dict[Any, tf.Tensor] = {}
    stock = resource_variable_ops.BaseResourceVariable.handle.fget

    def handle(variable: tf.Variable) -> tf.Tensor:
        found = stock(variable)
        if tf.is_symbolic_tensor(found) or found.ref() in before:
            return found
        with tf.init_scope():
            if tf.raw_ops.VarIsInitializedOp(resource=found):
                value = tf.raw_ops.ReadVariableOp(resource=found, dtype=variable.dtype)
                before[found.ref()] = value
        return found

    kind = resource_variable_ops.BaseResourceVariable
    try:
        with replacing(kind, "handle", property(handle)):
            yield
    finally:
        for reference, value in before.items():
            tf.raw_ops.AssignVariableOp(resource=reference.deref(), value=value)
