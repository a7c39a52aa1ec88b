"""Embedding rows that a batch looks up several times.

Their gradients are added up before the optimizer sees them, on any number of replicas.
Keras' own step hands the optimizer one gradient for each look-up: Adam, RMSprop and
others then add up the *squares* of these, which no sum over replicas has. SGD gives the
same either way, unless it clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import keras
import tensorflow as tf

from collective.log import log
from collective.training import keras_compat

_noted: WeakSet[keras.Optimizer] = WeakSet()


def sees_each(optimizer: keras.Optimizer) -> bool:
    """Whether an update by single look-ups is another than by their sum for each row."""
    clips = optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm
    return bool(clips) or not isinstance(optimizer, keras.optimizers.SGD)


def values_of(gradient: Any) -> tf.Tensor:
    """The numbers of a gradient: of IndexedSlices, those of each look-up."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient: Any, values: tf.Tensor) -> Any:
    """The gradient with other numbers: of IndexedSlices, for the same look-ups."""
    if not isinstance(gradient, tf.IndexedSlices):
        return values
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def note(variables: Sequence[keras.Variable], optimizer: keras.Optimizer) -> None:
    """Says once that the result is not that of ``model.fit``.

    Args:
        variables: Whose gradients are added up by rows.
    """
    others = [
        single.name
        for single in keras_compat.single_optimizers(optimizer)
        if sees_each(single)
    ]
    if variables and others and optimizer not in _noted:
        _noted.add(optimizer)
        log.warning(
            "%s sees one gradient for each row of %r, the sum over its look-ups; "
            "model.fit squares or clips that of each look-up by itself, and so does "
            "embedding_gradients='keras' (docs/reference/sharp-bits.md)",
            others[0],
            variables[0].path,
        )
