"""Writes checkpoints while the training runs, on rank 0.

When rank 0 has died or left, another rank becomes rank 0 and continues in the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from collective import recorder
from collective.elastic import generations
from collective.training.checkpoint.schedule import Checkpoint
from collective.training.checkpoint.state import State
from collective.training.input.plan import Plan
from collective.training.observer import FinishedStep, Observer
from collective.training.position import Position


class CheckpointObserver(Observer):
    """Reads the state to start from, and writes states when they are due.

    Args:
        checkpoint: Where and how often.
        position: Of the training; it gathers partitioned variables.
        plan: Of the batches.
        before_write: Called before each checkpoint, in the thread that writes it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        position: Position,
        plan: Plan,
        before_write: Callable[[], None] | None = None,
    ):
        self._checkpoint = checkpoint
        self._position = position
        self._backend = position.backend
        self._plan = plan
        self._before_write = before_write
        self._writes = False  # this process is rank 0 and has the folder
        self._epoch_end = 0

    @property
    def folder(self) -> os.PathLike[str] | None:
        """Where this rank writes checkpoints; None if it does not."""
        return self._checkpoint.folder if self._writes else None

    def find_start(self) -> None:
        """Sets the position's ``start``, on rank 0, unless it has one already.

        Called once, before the observers begin.

        Raises:
            UsageError: The folder cannot be used as was asked.
        """
        checkpoint, position = self._checkpoint, self._position
        if not self._backend.elastic:
            resume = "again" if checkpoint.resume else "with --resume"
            recorder.advise(
                f"should the job end, the same command {resume} continues from "
                f"{checkpoint.folder}"
            )
        if self._backend.rank or self._backend.joins:
            return
        if position.start is None:
            restarted = generations.number() > 0
            position.start = checkpoint.begin(position.model, self._plan, restarted)
            self._writes = True
        else:
            self._take_over()

    def reconfigured(self, root: int) -> None:
        """On a new rank 0, takes over the folder."""
        self._take_over()

    def _take_over(self) -> None:
        if self._backend.rank == 0 and not self._writes:
            self._checkpoint.take_over(self._position.model, self._plan)
            self._writes = True

    def begin_epoch(self, epoch: int, first: int, last: int) -> None:
        """Learns where the epoch ends."""
        self._epoch_end = last

    def after_step(self, step: FinishedStep) -> None:
        """Writes the state if it is due; not at the end of an epoch."""
        if self._position.step < self._epoch_end and not self._position.stopped:
            self._save(epoch_ended=False)

    def between_epochs(self) -> None:
        """Writes the state if it is due."""
        self._save(epoch_ended=True)

    def _save(self, epoch_ended: bool) -> None:
        position = self._position
        if self._checkpoint.due(position.step, epoch_ended):
            gathered = position.gather()  # a collective
            if self._writes:
                self._checkpoint.save(
                    lambda buffers: position.take(buffers, gathered), self._before_write
                )

    def end_epochs(self) -> None:
        """Writes the last state."""
        assert self._position.final is not None
        self.save_last(self._position.final)

    def save_last(self, state: State) -> None:
        """Writes a state on rank 0, and returns when it is on the disk."""
        if self._writes:
            self._checkpoint.end(state, self._before_write)

    def wait(self) -> None:
        """Returns when no checkpoint is being written."""
        if self._writes:
            self._checkpoint.wait()

    def close(self) -> None:
        """Waits as ``wait``, and unlocks the folder for another process."""
        if self._writes:
            self._checkpoint.close()
