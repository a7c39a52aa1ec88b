"""XLA for functions with collectives, which XLA cannot compile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


def compiled_around_collectives(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have XLA compile a function in clusters between its collectives.

    ``tf.function(jit_compile=True)`` compiles everything or fails. With this,
    TensorFlow cuts the graph into clusters of operations that XLA knows, forward and
    backward, and runs the rest without XLA. In an eager call, nothing is compiled.
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
    """Compile nothing inside, because only the values of a step decide the shapes.

    XLA would compile for each of them again, and on GPUs it cannot compile for shapes
    that come out of a collective.
    """
    if tf.executing_eagerly():
        yield
    else:
        with tf.xla.experimental.jit_scope(compile_ops=False):
            yield
