"""Which rows make up global batch s, and which replica gets which: arithmetic alone.

All follows from (rows, global batch size, seed, step). No process asks another one, a
training resumes at any step on any number of replicas, and from these four numbers anyone
can compute what should have been read. Needs only NumPy, but for Keras' own order.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from collective.training.input.permutation import permute

#: A step or an epoch that is never reached: the number is not known beforehand.
ENDLESS = sys.maxsize


def share(rows: Any, replica: Any, replicas: int) -> tuple[Any, Any]:
    """Return which rows of a global batch a replica gets.

    Shares are contiguous, in the order of replicas, and their sizes differ by one at
    most. Some are empty if there are fewer rows than replicas. Works on integers and
    on tensors; the result is half-open.
    """
    return replica * rows // replicas, (replica + 1) * rows // replicas


@dataclass(frozen=True)
class RowPlan:
    """The global batches of a training."""

    rows: int  # rows of an epoch; each is used exactly once
    global_batch_size: int  # rows of a step; the last step of an epoch may have fewer
    seed: int  # with the number of the epoch, it determines the order of rows
    # False keeps the source's order; True is one of our own, which is never held in
    # memory; ``row_order.KINDS`` are Keras' own.
    shuffle: bool | str

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps of an epoch, the short one included."""
        return -(-self.rows // self.global_batch_size)

    def rows_before(self, step: Any) -> Any:
        """Return the rows of all steps before one, over all epochs; an integer or a tensor."""
        epoch, within = step // self.steps_per_epoch, step % self.steps_per_epoch
        return epoch * self.rows + within * self.global_batch_size

    def row_numbers(self, first_step: int, last_step: int) -> np.ndarray:
        """Return the row numbers of successive steps, concatenated: int64, one for each row."""
        start, stop = (int(self.rows_before(s)) for s in (first_step, last_step))
        numbers = np.arange(start, stop, dtype=np.int64)
        epochs, positions = np.divmod(numbers, self.rows)
        if not self.shuffle:
            return positions
        for epoch in range(start // self.rows, -(-stop // self.rows)):
            within = epochs == epoch
            numbers[within] = self._order(epoch, positions[within])
        return numbers

    def _order(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the rows at some positions of an epoch."""
        if not isinstance(self.shuffle, str):
            return permute(positions, self.rows, (self.seed, epoch))
        # Only here: what checks a ledger of another order needs no TensorFlow.
        from collective.training.input.row_order import keras_order

        kind = self.rows, self.global_batch_size, self.seed, self.shuffle
        return keras_order(*kind).of_pass(epoch)[positions]
