"""XLA for what contains collectives, which XLA cannot compile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


def compiled_around_collectives(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; what it traces is compiled in clusters between its collectives.

    ``tf.function(jit_compile=True)`` compiles everything or fails. Here TensorFlow cuts
    the graph into clusters of what XLA knows, forward and backward, and runs the rest
    as it is. Called eagerly, nothing is compiled.
    """

    @functools.wraps(function)
    def clustered(*args: Any) -> Any:
        if tf.executing_eagerly():
            return function(*args)
        with tf.xla.experimental.jit_scope():
            return function(*args)

    return clustered


@contextlib.contextmanager
def not_compiled() -> Iterator[None]:
    """Inside, nothing is compiled: for shapes that only the values of a step decide.

    XLA would compile each of them again, and on GPUs it cannot at all where they come
    out of a collective.
    """
    if tf.executing_eagerly():
        yield
    else:
        with tf.xla.experimental.jit_scope(compile_ops=False):
            yield
