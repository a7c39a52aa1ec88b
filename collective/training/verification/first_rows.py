"""A few rows of a source, the same on every rank, without reading it as a training does."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from collective.training.input.batches import Batches
from collective.training.input.leaves import present
from collective.training.input.pipeline import Batch, Input
from collective.training.input.source import Source
from collective.training.step.rows import Rows

# Of an axis whose length differs from batch to batch.
_OPEN_AXIS = 5


def read_rows(source: Source, numbers: np.ndarray) -> Rows | None:
    """Rows by number, ``()`` for what is absent.

    Args:
        numbers: int64 ``[n]``.

    Returns:
        None where the source has no random access: its rows can be read once only.
    """
    if not source.random_access:
        return None
    row = source.read(tf.constant(numbers, tf.int64))
    parts: list[Any] = [() if part is None else part for part in row]
    if not tf.nest.flatten(parts[0]):
        return None
    return Rows(*parts)


def first_rows(inputs: Input | Batches, most: int) -> Rows | None:
    """The first rows of the first batch; made up where they can be read once only.

    Returns:
        At most ``most`` rows; None where they are no plain tensors.
    """
    rows = None
    if isinstance(inputs, Input):
        rows = read_rows(inputs.source, inputs.plan.row_numbers(0, 1)[:most])
    return made_up_rows(inputs.spec, most) if rows is None else rows


def made_up_rows(spec: Batch, number: int) -> Rows | None:
    """Rows of these shapes, for data that can be read once only.

    Numbers are random, labels, tokens and flags 0 or 1, which every vocabulary has.

    Returns:
        None where a leaf is no plain tensor of numbers.
    """
    if not all(map(_is_plain, present((spec.x, spec.y, spec.sample_weight)))):
        return None
    rng = np.random.default_rng(0)

    def made(leaf: tf.TensorSpec, bits: bool) -> tf.Tensor:
        shape = [number, *(size or _OPEN_AXIS for size in leaf.shape[1:])]
        bits = bits or not leaf.dtype.is_floating
        values = rng.integers(0, 2, shape) if bits else rng.normal(size=shape)
        return tf.cast(tf.constant(values), leaf.dtype)

    def part(tree: Any, bits: bool = False) -> Any:
        tree = tree if present(tree) else ()
        return tf.nest.map_structure(lambda leaf: made(leaf, bits), tree)

    x, y, weight = part(spec.x), part(spec.y, bits=True), part(spec.sample_weight)
    weight = tf.nest.map_structure(lambda t: tf.abs(t) + 0.5, weight)
    return Rows(x, y, weight) if tf.nest.flatten(x) else None


def _is_plain(leaf: Any) -> bool:
    if not isinstance(leaf, tf.TensorSpec) or not leaf.shape.rank:
        return False
    return leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool


def count(rows: Rows) -> int:
    """How many there are."""
    return int(tf.nest.flatten(rows.x)[0].shape[0])
