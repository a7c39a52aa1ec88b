"""Rows of a batch as what goes into a ``tf.function``.

Functions with a signature take no None, so ``()`` stands for what a batch does not have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective.training.input.pipeline import Batch


class Rows(NamedTuple):
    """Rows of a batch: trees of tensors ``[n, ...]``, ``()`` for what is absent."""

    x: Any
    y: Any
    sample_weight: Any


def rows_of(batch: Batch) -> Rows:
    """The rows of a batch, or of a specification of one."""
    x, y, sample_weight, *_ = without_none(batch)
    return Rows(x, y, sample_weight)


def without_none(batch: Batch) -> Batch:
    """The batch with ``()`` for None."""
    return Batch(*(() if part is None else part for part in batch))


def or_none(part: Any) -> Any:
    """None for ``()``, as Keras wants it."""
    return None if isinstance(part, tuple) and not part else part


def packed(rows: Rows) -> Any:
    """The ``data`` of a step, as Keras' ``fit`` gives them.

    Floating-point rows have the precision that Keras converts arrays to.
    """
    dtype = keras.config.floatx()
    cast = tf.nest.map_structure(
        lambda t: tf.cast(t, dtype) if t.dtype.is_floating else t, rows
    )
    return keras.utils.pack_x_y_sample_weight(*map(or_none, cast))
