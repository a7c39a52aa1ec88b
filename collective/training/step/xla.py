"""XLA for a pass that contains collectives, which XLA cannot compile."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.log import log
from collective.training import compatibility


def chosen(
    wanted: bool | None,
    model: keras.Model,
    backend: Backend,
    features: Collection[str],
) -> bool:
    """Whether XLA compiles the passes of a step.

    Args:
        wanted: ``jit_compile`` of ``fit``; None compiles as Keras would: where
            ``model.compile`` was told to, and by default on GPUs.
        features: Of the training, by their names in the table of compatibility.
    """
    if wanted is not None:
        return wanted
    if not model.jit_compile:
        return False
    possible = compatibility.works({"jit_compile", *features}, backend)
    if backend.rank == 0 and not possible:
        log.info("XLA compiles nothing here (docs/reference/compatibility.md)")
    return possible


def compiled_around_collectives(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; what it traces is compiled in clusters between its collectives.

    ``tf.function(jit_compile=True)`` compiles everything or fails. Here TensorFlow cuts
    the graph into clusters of what XLA knows, forward and backward, and runs the rest
    as it is. Called eagerly, nothing is compiled.
    """

    def clustered(*args: Any) -> Any:
        if tf.executing_eagerly():
            return function(*args)
        with tf.xla.experimental.jit_scope():
            return function(*args)

    return clustered
