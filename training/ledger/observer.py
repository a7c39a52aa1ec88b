"""Writes the ledger while the training runs, on rank 0.

When rank 0 has died or left, another rank becomes rank 0 and continues the file.
"""

from __future__ import annotations

import os

import numpy as np

from collective.training.input.plan import Plan
from collective.training.ledger import receipts
from collective.training.ledger.writer import Ledger
from collective.training.observer import FinishedStep, Observer
from collective.training.position import Position
from collective.training.replica.attachments import Total


class LedgerObserver(Observer):
    """Appends what each replica has read in each finished step.

    Args:
        path: The file.
        position: Of the training.
        plan: Of the batches.
    """

    def __init__(self, path: str | os.PathLike[str], position: Position, plan: Plan):
        self._path = path
        self._position = position
        self._backend = position.backend
        self._plan = plan
        self._ledger: Ledger | None = None  # on rank 0
        self._receipts = receipts.Receipts(self._backend)
        self.attachments = [self._receipts]
        # The last finished step: its number, replicas and receipts.
        self._last: tuple[int, int, Total] | None = None
        self._written = -1  # the last step that this rank has written

    def begin(self) -> None:
        """Notes the first step and the number of replicas, on rank 0."""
        if self._backend.rank == 0:
            ledger = self._ledger = self._ledger or Ledger(self._path)
            replicas, name = self._backend.replicas, self._backend.name
            ledger.begin(self._plan, self._position.step, replicas, name)

    def reconfigured(self, root: int) -> None:
        """As ``begin``; writes the last step where the former rank 0 died before it."""
        last = self._last_step_of(root)
        if self._backend.rank == 0 and last.any() and last[0] != self._written:
            ledger = self._ledger = self._ledger or Ledger(self._path)
            number, replicas = int(last[0]), int(last[1])
            ledger.begin(self._plan, number, replicas, self._backend.name)
            ledger.add(number, receipts.read(last[2:])[:replicas])
        self.begin()

    def _last_step_of(self, root: int) -> np.ndarray:
        """A rank's last step, its number of replicas and receipts; zeros for none."""
        last = np.zeros(2 + receipts.SIZE * self._backend.most_replicas)
        if self._last is not None:
            number, replicas, total = self._last
            last[:2] = number, replicas
            last[2:] = total.numpy()
        return self._backend.broadcast_array(last, root)

    def after_step(self, step: FinishedStep) -> None:
        """Writes the receipts of the step, on rank 0."""
        total, replicas = self._receipts.last, self._backend.replicas
        assert total is not None
        self._last = step.number, replicas, total
        if self._ledger is not None:
            read = receipts.read(total.numpy())
            self._ledger.add(step.number, read[:replicas])
            self._written = step.number

    def sync(self) -> None:
        """Returns when the disk has all that was written; called from any thread."""
        if self._ledger is not None:
            self._ledger.sync()

    def close(self) -> None:
        """Closes the file; another rank may continue it."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
