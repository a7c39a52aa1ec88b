"""Which rows make up global batch s, and which of them are whose: arithmetic alone.

Everything follows from (rows, global batch size, seed, step), so nobody asks anybody,
a training resumes at any step on any number of replicas, and whoever has these four
numbers can say what should have been read. Needs NumPy and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from collective.training.input.permutation import permute


def share(rows: Any, replica: Any, replicas: int) -> tuple[Any, Any]:
    """The splitting rule: which rows of a global batch a replica gets.

    Contiguous, in order of replicas, sizes differ by one at most; empty for some
    where there are fewer rows than replicas. Works on integers and on tensors.

    Returns:
        ``(start, stop)``, half-open.
    """
    return replica * rows // replicas, (replica + 1) * rows // replicas


@dataclass(frozen=True)
class Plan:
    """The global batches of a training.

    Attributes:
        rows: Rows of an epoch; each comes exactly once in it.
        global_batch_size: Rows of a step; the last one of an epoch may have fewer.
        seed: Decides the order of rows, with the epoch.
        shuffle: Whether there is such an order; False keeps the source's.
    """

    rows: int
    global_batch_size: int
    seed: int
    shuffle: bool

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the short one included."""
        return -(-self.rows // self.global_batch_size)

    def global_rows(self, step: int) -> int:
        """Number of rows in global batch ``step``; steps count on over epochs."""
        first = step % self.steps_per_epoch * self.global_batch_size
        return min(self.global_batch_size, self.rows - first)

    def row_numbers(self, first_step: int, last_step: int) -> np.ndarray:
        """Row numbers of successive steps of one epoch, one behind the other.

        Args:
            first_step: First step.
            last_step: Step to stop before, in the same epoch.

        Returns:
            int64 ``[rows of those steps]``.
        """
        epoch, first = divmod(int(first_step), self.steps_per_epoch)
        start = first * self.global_batch_size
        stop = start + int(last_step - first_step) * self.global_batch_size
        positions = np.arange(start, min(stop, self.rows), dtype=np.int64)
        if not self.shuffle:
            return positions
        return permute(positions, self.rows, (self.seed, epoch))
