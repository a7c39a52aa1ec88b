"""The first rows of the data, the same on every rank, that the training still has.

They are the user's own: labels that are made up have no ignored ones, no rare classes
and no positive ones, by which a loss may divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.training.input.batches import Batches
from collective.training.input.leaves import count_rows, first_leaf, present
from collective.training.input.pipeline import Input
from collective.training.input.source import Row, Source
from collective.training.step.accumulation import slice_rows
from collective.training.step.rows import Rows

# A few rows of a large model take seconds; a small one may have so many.
_FEW, _MANY = 7, 32
_LARGE_ROW, _LARGE_MODEL = 1 << 16, 5_000_000
# In which proportion they are cut: unevenly, so that a mean of means differs from the
# mean, and unlike most widths of a network.
_SHARES = (11, 7, 13, 5, 3)


def read_rows(source: Source, numbers: np.ndarray) -> Rows | None:
    """Rows by number, ``()`` for what is absent.

    Args:
        numbers: int64 ``[n]``.

    Returns:
        None where the source has no random access: its rows can be read once only.
    """
    if not source.random_access:
        return None
    return _as_rows(source.read(tf.constant(numbers, tf.int64)))


def first_batches(inputs: Input | Batches) -> list[Rows]:
    """The first two global batches, or what is known of them; none of empty data.

    Every rank calls it, before anything else reads the data.
    """
    if isinstance(inputs, Batches):
        found = [_as_rows(batch) for batch in inputs.first_batches()]
        return [rows for rows in found if rows is not None and count(rows)]
    size = inputs.global_batch_size
    first = inputs.source.preview
    if first is None:
        numbers = inputs.plan.row_numbers(0, 2)
        split = numbers[:size], numbers[size : 2 * size]
        batches = [read_rows(inputs.source, part) for part in split if part.size]
        return [rows for rows in batches if rows is not None]
    known = _as_rows(first)
    if known is None:
        return []
    parts = [slice_rows(known, start, start + size) for start in (0, size)]
    return [part for part in parts if count(part)]


def _as_rows(row: Row) -> Rows | None:
    """With ``()`` for None; None without any input."""
    parts = [() if part is None else part for part in row]
    return Rows(*parts) if present(parts[0]) else None


def count(rows: Rows) -> int:
    """Number of rows."""
    return int(count_rows(first_leaf(rows.x)))


def fewer(rows: Rows, most: int) -> Rows:
    """The first rows."""
    return slice_rows(rows, 0, most) if count(rows) > most else rows


def compared_rows(model: Any, rows: Rows) -> int:
    """How many rows a comparison takes: more where they cost little."""
    return _FEW if is_large(model, rows) else _MANY


def is_large(model: Any, rows: Rows) -> bool:
    """Whether to compute a few rows takes seconds."""
    of_one = sum(
        int(np.prod([size or 1 for size in leaf.shape[1:]])) * leaf.dtype.size
        for leaf in tf.nest.flatten(rows.x)
    )
    size = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    return bool(of_one > _LARGE_ROW or size > _LARGE_MODEL)


def uneven(rows: int, pieces: int) -> list[int]:
    """Sizes of so many pieces, as unlike as they can be; fewer where rows are few."""
    shares = np.resize(_SHARES, pieces)
    if rows < 2 * pieces:
        shares = np.ones(pieces)
    stops = np.round(np.cumsum(shares) * rows / shares.sum()).astype(int)
    return [int(n) for n in np.diff([0, *stops]) if n]


def cut(rows: Rows, sizes: Sequence[int]) -> list[Rows]:
    """Consecutive pieces of these sizes."""
    stops = np.cumsum(sizes)
    return [
        slice_rows(rows, int(stop - size), int(stop))
        for size, stop in zip(sizes, stops, strict=True)
    ]
