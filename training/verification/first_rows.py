"""A few rows of a source, the same on every rank, without reading it as a training does."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from collective.training.input.source import Source
from collective.training.step_inputs import Rows


def read_rows(source: Source, numbers: np.ndarray) -> Rows | None:
    """Rows by number, ``()`` for what is absent.

    Args:
        source: Reads them.
        numbers: int64 ``[n]``. A source without random access has its first rows only.

    Returns:
        None where the source keeps no rows that can be read twice.
    """
    if source.random_access:
        row = source.read(tf.constant(numbers, tf.int64))
    else:
        first = getattr(source, "first_rows", None)
        if first is None:
            return None
        row = first(len(numbers))
    parts: list[Any] = [() if part is None else part for part in row]
    if not tf.nest.flatten(parts[0]):
        return None
    return Rows(*parts)


def count(rows: Rows) -> int:
    """How many there are."""
    return int(tf.nest.flatten(rows.x)[0].shape[0])
