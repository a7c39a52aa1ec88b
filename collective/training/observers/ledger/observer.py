"""Writes the ledger while the training runs, on rank 0, from receipts of all replicas.

A ledger must say which rows were *read*, and only their reader knows that. So each replica
puts the places of its rows in the global batch and a checksum of their numbers into one
row of a small matrix, which the all-reduce of the gradients sums with the rest. So a step
that some rank did not finish leaves no receipt, and the ledger costs no message.

The sum may be of float32, or sent as bfloat16, so numbers are sent byte by byte:
integers up to 255 are exact in all of these.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from collective.training.input.plan import RowPlan
from collective.training.loop.observer import FinishedStep, Observer
from collective.training.loop.position import Position
from collective.training.observers.ledger.writer import Ledger

BYTES = 4
SIZE = 3 * BYTES


class Receipts(Protocol):
    """What has the receipts of all replicas after each step."""

    @property
    def total(self) -> Any:
        """Return them: what has ``numpy()``, numbers ``replicas * SIZE``."""
        ...


class LedgerObserver(Observer):
    """Appends the rows that each replica has read in each finished step.

    When rank 0 has died or left, another rank becomes rank 0 and continues the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        position: Position,
        plan: RowPlan,
        receipts: Receipts,
    ):
        self._path = path
        self._position = position
        self._backend = position.backend
        self._plan = plan
        self._ledger: Ledger | None = None  # on rank 0
        self._receipts = receipts
        # The last finished step: its number, replicas and receipts.
        self._last: tuple[int, int, Any] | None = None
        self._written = -1  # the last step that this rank has written

    @property
    def _replicas(self) -> int:
        """Return how many have rows of their own."""
        return self._backend.replicas // self._backend.options.tensor_parallel

    def begin(self) -> None:
        """Note the first step and the number of replicas, on rank 0."""
        if self._backend.rank == 0:
            self._begin(self._position.step, self._replicas)

    def reconfigured(self, root: int) -> None:
        """Do what ``begin`` does, and write the last step if the former rank 0 has not."""
        last = self._last_step_of(root)
        if self._backend.rank == 0 and last.any() and last[0] != self._written:
            number, replicas = int(last[0]), int(last[1])
            ledger = self._begin(number, replicas)
            ledger.add(number, read_receipts(last[2:])[:replicas])
        self.begin()

    def _begin(self, step: int, replicas: int) -> Ledger:
        ledger = self._ledger = self._ledger or Ledger(self._path)
        ledger.begin(self._plan, step, replicas, self._backend.name)
        return ledger

    def _last_step_of(self, root: int) -> np.ndarray:
        """Return a rank's last step, its replicas and receipts; zeros if there is none."""
        last = np.zeros(2 + SIZE * self._backend.most_replicas)
        if self._last is not None:
            number, replicas, total = self._last
            last[:2] = number, replicas
            last[2:] = total.numpy().ravel()
        return self._backend.broadcast_array(last, root)

    def after_step(self, step: FinishedStep) -> None:
        """Write the receipts of the step, on rank 0."""
        replicas, total = self._replicas, self._receipts.total
        self._last = step.number, replicas, total
        if self._ledger is not None:
            read = read_receipts(total.numpy().ravel())
            self._ledger.add(step.number, read[:replicas])
            self._written = step.number

    def sync(self) -> None:
        """Wait until everything is on the disk; called from any thread."""
        if self._ledger is not None:
            self._ledger.sync()

    def close(self) -> None:
        """Close the file; another rank may continue it."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None


def read_receipts(summed: np.ndarray) -> list[tuple[int, int, int]]:
    """Return start, stop and mark of each replica from the summed matrix, a flat vector."""
    digits = np.rint(summed).astype(np.int64).reshape(-1, 3, BYTES)
    numbers = digits @ (256 ** np.arange(BYTES, dtype=np.int64))
    return [(start, stop, mark) for start, stop, mark in numbers.tolist()]
