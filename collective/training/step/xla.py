"""Whether XLA compiles the passes of a step."""

from __future__ import annotations

from collections.abc import Collection

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
            ``model.compile`` asks for, and by default on GPUs.
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


def pays_for_updates(backend: Backend) -> bool:
    """Whether XLA compiles the update, too: on a GPU, where no strategy holds variables.

    On processors it gains nothing, and the bits of earlier trainings stay.
    """
    with backend.scope():
        held = tf.distribute.has_strategy()
    return bool(tf.config.list_logical_devices("GPU")) and not held
