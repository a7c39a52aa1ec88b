"""Data of any supported kind as a source of rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.errors import UsageError
from collective.training.input.arrays import Arrays
from collective.training.input.source import Source, described
from collective.training.input.stream import Stream


def as_source(data: Any) -> Source:
    """Return the source for data of any supported kind.

    Args:
        data: A Source; ``(x, y)`` or ``(x, y, sample_weight)`` of arrays or of
            dicts/tuples of arrays; or an unbatched ``tf.data.Dataset`` whose elements
            are such rows.

    Raises:
        UsageError: It is none of these, or arrays differ in length.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, tf.data.Dataset):
        return Stream(data)
    if isinstance(data, tuple) and len(data) in (2, 3):
        return Arrays(*data)
    raise UsageError(
        f"{described(data)} is not data to train on",
        hint="pass (x, y) or (x, y, sample_weight) arrays, a tf.data.Dataset of rows, "
        "or a collective.training.input.source.Source",
    )
