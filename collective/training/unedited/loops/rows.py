"""Which inputs of a step are rows of a batch, and this rank's of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training.input.plan import share
from collective.training.variants.coupled.replica import at_least_one_row
from collective.training.variants.custom_step.share import Share


class Piece(NamedTuple):
    """This rank's rows of a batch."""

    share: Share
    rank: int  # whose they are
    start: int  # index of the first one
    rows: int  # number of them; 0 where the batch has fewer rows than ranks
    total: int  # rows of the batch


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a first axis that may be rows."""
    return isinstance(leaf, tf.Tensor | np.ndarray) and bool(len(leaf.shape))


def find_rows(leaves: Sequence[Any], among: Sequence[int], step: str) -> list[int]:
    """The indices of the leaves that are rows: those of the most common length.

    Args:
        among: Indices of the leaves that may be.
        step: Its name, for an error.

    Raises:
        UsageError: There is none.
    """
    arrays = [i for i in among if is_array(leaves[i])]
    if not arrays:
        raise UsageError(
            f"{step} updates a model, and is given no batch of rows (a tensor or array)",
            hint="give the batch to it as arguments, for x, y in data: step(x, y); or "
            "leave out --loops: each rank then runs the loop whole",
        )
    rows = Counter(leaves[i].shape[0] for i in arrays).most_common(1)[0][0]
    return [i for i in arrays if leaves[i].shape[0] == rows]


def cut(
    leaves: Sequence[Any], indices: Sequence[int], backend: Backend, number: Any
) -> tuple[list[Any], Piece]:
    """This rank's rows of the leaves at ``indices``.

    Returns:
        These leaves, with one row made up where this rank has none; what they are of
        the batch.

    Raises:
        UsageError: They have different numbers of rows.
    """
    lengths = {leaves[i].shape[0] for i in indices}
    if len(lengths) > 1 or None in lengths:
        raise UsageError(
            f"inputs of one step have {', '.join(map(str, lengths))} rows",
            hint="give a step the rows of one batch",
        )
    (total,) = lengths
    start, stop = share(total, backend.rank, backend.size)
    own = [leaves[i][start:stop] for i in indices]
    if stop == start:
        tensors = map(tf.convert_to_tensor, own)
        own = [at_least_one_row(t, tf.constant(0, tf.int64)) for t in tensors]
        for tensor in own if not tf.executing_eagerly() else ():
            tensor.set_shape([1, *tensor.shape[1:]])
    numbers = (stop - start, total, number, backend.rank, start)
    share_of = Share(*(tf.cast(n, tf.int64) for n in numbers))
    return own, Piece(share_of, backend.rank, start, stop - start, total)


def fingerprint(leaves: Sequence[Any], indices: Sequence[int]) -> tf.Tensor:
    """A number that differs between batches: float64 scalar, finite.

    Other rows, or the same in another order, give another number.
    """
    total = tf.zeros([], tf.float64)
    for i in indices:
        tensor = tf.convert_to_tensor(leaves[i])
        if tensor.dtype == tf.string:
            tensor = tf.strings.to_hash_bucket_fast(tensor, 2**31)
        values = tf.reshape(tf.cast(tensor, tf.float64), [tensor.shape[0], -1])
        values = tf.where(tf.math.is_finite(values), values, 0.5)
        of_rows = tf.reduce_sum(values, axis=1)
        places = tf.range(1, tensor.shape[0] + 1, dtype=tf.float64)
        total += tf.reduce_sum(of_rows * places) / tensor.shape[0]
    return total


def put(leaves: Sequence[Any], indices: Sequence[int], values: Sequence[Any]) -> list:
    """The leaves, with other values at ``indices``."""
    result = list(leaves)
    for index, value in zip(indices, values, strict=True):
        result[index] = value
    return result
