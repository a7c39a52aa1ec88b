"""Layers that were frozen, or not, when the model was compiled and first trained.

Keras traces the training step once after ``compile``: a later ``layer.trainable = True``
has no effect until the model is compiled again. This module keeps that behaviour.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import keras

from collective.backends.base import Backend
from collective.log import log
from collective.training import keras_compat
from collective.training.model.record import record_of


@contextlib.contextmanager
def as_compiled(model: object, backend: Backend) -> Iterator[None]:
    """Train the layers of the first training after ``compile``, and say so.

    Args:
        model: A model; for a function that makes a new model, nothing is done.
    """
    if not isinstance(model, keras.Model) or not model.compiled:
        yield
        return
    settings = [
        weakref.ref(part)
        for part in keras_compat.model.compiled_settings(model)
        if part is not None
    ]
    record, now = record_of(model), keras_compat.model.trainable_flags(model)
    flags = record.flags
    if record.compiled != settings or len(now) != len(flags):
        record.compiled, record.flags = settings, now
        yield
        return
    changed = [
        (layer, wanted)
        for layer, wanted, flag in zip(
            keras_compat.model.layers_of(model), now, flags, strict=True
        )
        if wanted != flag
    ]
    if changed and backend.rank == 0:
        log.warning(
            "layer.trainable of %r has changed since the model was compiled: it is "
            "trained as it was compiled, as Keras does (model.compile again to follow)",
            changed[0][0].name,
        )
    keras_compat.model.set_trainable_flags(model, flags)
    try:
        yield
    finally:
        for layer, wanted in changed:
            layer.trainable = wanted
