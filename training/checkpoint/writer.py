"""The files of a training: its checkpoints and its ledger, which rank 0 writes.

Ranks come and go, so another rank may have become rank 0: it takes both over where the
former one has left them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np

from collective import recorder
from collective.backends.base import Backend
from collective.training.attachments import Total
from collective.training.checkpoint.schedule import Checkpoint
from collective.training.checkpoint.state import State
from collective.training.input.plan import Plan
from collective.training.ledger import receipts
from collective.training.ledger.writer import Ledger
from collective.training.prepared import get_partition

Gathered = Mapping[int, np.ndarray]
"""What ranks have parts of, whole on rank 0, by the ``id`` of the variable."""
TakeState = Callable[[Sequence[np.ndarray] | None, Gathered], State]
"""Makes the state; puts the values of variables into these arrays, if there are any."""


class Files:
    """What a training has been asked to write.

    Args:
        backend: Its rank 0 writes.
        plan: Of the batches.
        checkpoint: Where the state is kept; None: nowhere.
        ledger: Which rows were used; None: that is not noted.
    """

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        checkpoint: Checkpoint | None,
        ledger: str | os.PathLike[str] | None,
    ):
        self.backend = backend
        self.plan = plan
        self._asked = checkpoint, ledger
        self._checkpoint: Checkpoint | None = None  # on rank 0, as the next
        self._ledger: Ledger | None = None
        self._last: tuple[int, int, Total] | None = None  # step, replicas, receipts
        self._noted = -1  # the last step in the ledger of this rank

    @property
    def folder(self) -> os.PathLike[str] | None:
        """Where this rank writes checkpoints; None where it does not."""
        return None if self._checkpoint is None else self._checkpoint.folder

    def begin(
        self, model: keras.Model, start: State | None, again: bool
    ) -> State | None:
        """The state to start from.

        Args:
            model: Whose state.
            start: One that was found elsewhere, and goes before.
            again: Whether this job has begun before.

        Raises:
            UsageError: If the folder of checkpoints cannot be used as was asked.
        """
        backend, (checkpoint, _) = self.backend, self._asked
        if checkpoint is None:
            return start
        if backend.options.min_np is None:
            resume = "again" if checkpoint.resume else "with --resume"
            recorder.advise(
                f"should the job end, the same command {resume} goes on from "
                f"{checkpoint.folder}"
            )
        if backend.rank or backend.joins:
            return start
        self._checkpoint = checkpoint
        if start is None:
            return checkpoint.begin(model, self.plan, again)
        checkpoint.take_over(model, self.plan)
        return start

    def lead(self, model: keras.Model, step: int, root: int | None) -> None:
        """Makes whoever is rank 0 now write; every rank calls it.

        Args:
            model: Whose state.
            step: The step that comes next.
            root: After ranks came or went, the first one that has made the last step.
        """
        backend, (checkpoint, ledger) = self.backend, self._asked
        if root is not None and ledger is not None:
            last = self._last_of(root)
        if backend.rank:
            return
        if self._checkpoint is None and checkpoint is not None:
            self._checkpoint = checkpoint
            checkpoint.take_over(model, self.plan)
        if ledger is None:
            return
        if self._ledger is None:
            self._ledger = Ledger(ledger)
        if root is not None and last.any() and last[0] != self._noted:
            # Who should have written it may have died before.
            number, replicas = int(last[0]), int(last[1])
            self._ledger.begin(self.plan, number, replicas, backend.name)
            self._ledger.add(number, receipts.read(last[2:])[:replicas])
        self._ledger.begin(self.plan, step, backend.replicas, backend.name)

    def _last_of(self, root: int) -> np.ndarray:
        """A rank's last step, its number of replicas and receipts; zero for none."""
        last = np.zeros(2 + receipts.SIZE * self.backend.most_replicas)
        if self._last is not None:
            number, replicas, total = self._last
            last[:2] = number, replicas
            last[2:] = total.numpy()
        return self.backend.broadcast_array(last, root)

    def note(self, step: int, total: Total) -> None:
        """Notes a finished step, and the receipts in it, in the ledger."""
        replicas = self.backend.replicas
        self._last = step, replicas, total
        if self._ledger is not None:
            self._ledger.add(step, receipts.read(total.numpy())[:replicas])
            self._noted = step

    def gathered(self, model: keras.Model) -> Gathered:
        """What a checkpoint needs of other ranks; every rank calls it."""
        parts = get_partition(model)
        return {} if parts is None or self._asked[0] is None else parts.gather()

    def save(
        self, model: keras.Model, step: int, epoch_ended: bool, take: TakeState
    ) -> None:
        """Writes a checkpoint where one is due; every rank calls it."""
        checkpoint = self._asked[0]
        if checkpoint is None or not checkpoint.due(step, epoch_ended):
            return
        whole = self.gathered(model)
        if self._checkpoint is not None:
            self._checkpoint.save(lambda buffers: take(buffers, whole), self._ledger)

    def save_last(self, state: Callable[[], State]) -> None:
        """Writes the last checkpoint, and waits for it."""
        if self._checkpoint is not None:
            self._checkpoint.end(state(), self._ledger)

    def wait(self) -> None:
        """Returns when no checkpoint is being written."""
        if self._checkpoint is not None:
            self._checkpoint.wait()

    def end_ledger(self) -> None:
        """Nothing more comes, unless ranks go on from a step before the end."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def close(self) -> None:
        """Writes nothing more, and leaves the folder to others."""
        if self._checkpoint is not None:
            self._checkpoint.close()
        self.end_ledger()
