"""Checkpoints of a training: when one is due, written behind its back, gone on from.

Rank 0 alone writes and reads; the others get what it has read by broadcast, so hosts
need no disk in common. At the end of a step the state is copied, into memory kept for
it, and a thread writes it while the next steps run. What both cost is measured, and a
checkpoint that comes before that is a twentieth of the time gone by is left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import numpy as np

from collective.errors import UsageError, printable
from collective.training.checkpoint import storage
from collective.training.checkpoint.state import State
from collective.training.input.plan import Plan
from collective.training.ledger.writer import Ledger
from collective.training.prepared import get_partition

# At most so much of a training's time goes into its checkpoints.
PART_OF_TIME = 0.05
LOCK = ".lock"
# So long a training before may take to end.
PATIENCE_SECONDS = 5.0

Take = Callable[[Sequence[np.ndarray] | None], State]
"""Makes a state; puts the values of variables into these arrays, if there are any."""


class Checkpoint:
    """Where a training keeps its state, for ``collective.training.fit(..., checkpoint=...)``.

    Args:
        folder: Made where it is not there; one for each training.
        every: Steps between two checkpoints; None: one at the end of each epoch.
            Where that would take more than 5 % of the time, some are left out. There is
            one at the end of the training, always.
        keep: How many are kept, the last ones.
        resume: Goes on from the newest one that is whole and of this training; from
            the start where there is none at all.

    Attributes:
        failed: Why the last checkpoint could not be written; None if it was.

    Raises:
        UsageError: If ``every`` or ``keep`` is below 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int = 3,
        resume: bool = False,
    ):
        if keep < 1 or (every is not None and every < 1):
            raise UsageError(
                "checkpoints are written every 1 or more steps, and 1 or more are kept",
                hint="--checkpoint-every 100; Checkpoint(folder, every=100, keep=3)",
            )
        self.folder = Path(folder)
        self.every = every
        self.keep = keep
        self.resume = resume
        self.failed: str | None = None
        self._known: list[Path] = []  # the last ones, oldest first
        self._buffers: list[np.ndarray] | None = None
        self._not_before = 0.0
        self._left_out = 0
        self._thread: threading.Thread | None = None
        self._lock: int | None = None

    def begin(
        self, model: keras.Model, plan: Plan, again: bool = False
    ) -> State | None:
        """The state to go on with, None for a new training. Rank 0 calls it.

        Args:
            model: Whose state it is.
            plan: Of the batches.
            again: Resumes, whatever was asked: this job has begun before.

        Raises:
            UsageError: If the folder cannot be used as was asked.
        """
        self.take_over(model, plan)
        self._known = []
        self.resume = self.resume or again
        return self._newest(model, plan)

    def take_over(self, model: keras.Model, plan: Plan) -> None:
        """Makes ready to write; in the middle of a training, after another rank.

        Raises:
            UsageError: If the folder cannot be written to, or another training that
                runs writes to it.
        """
        self._write = lambda state: storage.write(state, model, plan, self.folder)
        self._take_folder()
        self._known = storage.saved_in(self.folder)[: self.keep][::-1]

    def due(self, step: int, epoch_ended: bool) -> bool:
        """Whether the state before ``step`` is to be written."""
        return epoch_ended if self.every is None else step % self.every == 0

    def save(self, take: Take, ledger: Ledger | None = None) -> None:
        """Writes a state in the background, or leaves it out if that costs too much.

        Args:
            take: Makes the state; not called where it is left out.
            ledger: Brought to the disk before the checkpoint.
        """
        begin = time.perf_counter()
        writing = self._thread is not None and self._thread.is_alive()
        if writing or begin < self._not_before:
            self._left_out += 1
            return
        state = take(self._buffers)
        if self._buffers is None:
            self._buffers = [np.array(value) for value in state.variables]
        taken = time.perf_counter() - begin

        def write() -> None:
            self._save(state, ledger)
            # As if the writing took it all from the step: it takes memory, too.
            cost = taken + time.thread_time()
            self._not_before = begin + cost / PART_OF_TIME

        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Waits as ``wait``, and leaves the folder to others."""
        self.wait()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def end(self, state: State, ledger: Ledger | None = None) -> None:
        """Writes the last state, and waits for all that is being written."""
        self.wait()
        self._save(state, ledger)
        if self._left_out:
            _tell(
                f"{self._left_out} checkpoints were left out: so many would have taken "
                f"more than {PART_OF_TIME:.0%} of the time",
                hint="a larger --checkpoint-every; or leave it to do so",
            )

    def _save(self, state: State, ledger: Ledger | None) -> None:
        try:
            if ledger is not None:
                ledger.sync()
            path = self._write(state)
        except Exception as error:
            self.failed = str(error).strip().split("\n")[0]
            last = f"{self._known[-1].name} is the last" if self._known else "none is"
            hint = "see what model.save_weights says of this model"
            if isinstance(error, OSError):
                hint = "free some space on that disk"
            _tell(
                f"the checkpoint of step {state.step} could not be written to "
                f"{self.folder}: {self.failed}; {last} there; the training goes on",
                hint=hint,
            )
            return
        self.failed = None
        self._known = [p for p in self._known if p != path] + [path]
        while len(self._known) > self.keep:
            shutil.rmtree(self._known.pop(0), ignore_errors=True)

    def _take_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._keep_others_out()
            storage.remove_parts(self.folder)
            usable = os.access(self.folder, os.W_OK | os.X_OK)
        except OSError:
            usable = False
        if not usable:
            raise UsageError(
                f"checkpoints cannot be written to {self.folder}",
                hint="--checkpoint-dir DIR that can be made and written to",
                everywhere=False,
            )

    def _keep_others_out(self) -> None:
        """As long as this process lives, or until ``close``."""
        if self._lock is not None:
            return
        lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                os.close(lock)
                raise UsageError(
                    f"another training writes its checkpoints to {self.folder}",
                    hint="one --checkpoint-dir for each training that runs at a time",
                    everywhere=False,
                ) from None
            except OSError:
                pass  # this disk has no locks
            self._lock = lock
            return

    def _newest(self, model: keras.Model, plan: Plan) -> State | None:
        found, parts = storage.saved_in(self.folder), get_partition(model)
        if found and not self.resume:
            raise UsageError(
                f"{self.folder} has checkpoints already, up to {found[0].name}",
                hint="--resume goes on from there; or another --checkpoint-dir",
                everywhere=False,
            )
        reason = ""
        for place, path in enumerate(found):
            try:
                with parts.whole_shapes() if parts else contextlib.nullcontext():
                    state = storage.read(path, model, plan)
            except storage.Unusable as error:
                reason = reason or f"{path.name}: {error}"
                _tell(f"{path} is not used: {error}")
                continue
            self._known = found[place:][::-1]
            print(f"resumed from {path}: epoch {state.epoch + 1}, step {state.step}")
            return state
        if found:
            raise UsageError(
                f"no checkpoint in {self.folder} can be used ({reason})",
                hint="type the options it was made with, or another --checkpoint-dir",
                everywhere=False,
            )
        if self.resume:
            print(f"no checkpoint in {self.folder} yet: starting at step 0", flush=True)
        return None


def _tell(what: str, hint: str = "") -> None:
    print(printable(f"warning: {what}"), file=sys.stderr)
    if hint:
        print(f"HINT: {hint}", file=sys.stderr)
    sys.stderr.flush()
