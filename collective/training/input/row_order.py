"""The order in which ``keras.Model.fit`` takes the rows of arrays.

Keras' own adapter is given the numbers of the rows in place of the rows, and asked for its
batches: whatever it does with the seed, epoch by epoch, each process finds the same order
without asking another one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from collective.training import keras_compat

#: What ``shuffle`` may be in a plan besides False and True, which is an order of our own.
ROWS, WITHIN_BATCHES = "keras", "keras-batch"
KINDS = ROWS, WITHIN_BATCHES


class KerasOrder:
    """The orders of the passes over so many rows.

    Args:
        seed: TensorFlow's global seed, as ``keras.utils.set_random_seed`` sets it.
        kind: Of ``KINDS``.
    """

    def __init__(self, rows: int, batch_size: int, seed: int, kind: str):
        # Rows that are mixed together are of one batch here, whatever their number.
        size = rows if kind == ROWS else batch_size
        shuffle = True if kind == ROWS else "batch"
        numbers = np.arange(rows, dtype=np.int64)
        self._passes = functools.partial(
            keras_compat.data.passes, numbers, size, shuffle, seed
        )
        self._left: Iterator[np.ndarray] = iter(())
        self._number, self._order = -1, numbers

    def of_pass(self, number: int) -> np.ndarray:
        """Return the row numbers of a pass, int64 ``[rows]``. In order of passes it is fast."""
        if number < self._number or self._number < 0:
            self._left, self._number = self._passes(), -1
        while self._number < number:
            self._order = next(self._left)
            self._number += 1
        return self._order


@functools.lru_cache(maxsize=4)
def keras_order(rows: int, batch_size: int, seed: int, kind: str) -> KerasOrder:
    """Return the orders, kept for the calls that follow."""
    return KerasOrder(rows, batch_size, seed, kind)
