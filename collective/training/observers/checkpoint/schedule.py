"""Checkpoints of a training: decides when one is due, writes it, and resumes from one.

Rank 0 alone writes and reads, and broadcasts the state that it has read, so that hosts do
not need a common disk. When it has died or left, another rank becomes rank 0 and continues
in the folder. At the end of a step the state is copied into memory kept for it, and a thread
writes it while the next steps run. The cost of both is measured: a checkpoint is skipped if
checkpoints would take more than a twentieth of the time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from collective import recorder
from collective.elastic import generations, membership_file
from collective.errors import CollectiveError, UsageError, first_line, printable
from collective.launch import processes
from collective.log import log
from collective.running_time import Deadline
from collective.training.loop.observer import FinishedStep, Observer
from collective.training.loop.position import Position
from collective.training.loop.state import Gathered, State
from collective.training.observers.checkpoint import storage, stores

# Checkpoints take at most this fraction of a training's time.
PART_OF_TIME = 0.05
LOCK = ".lock"
# A former training may take as long as this to release the folder.
PATIENCE_SECONDS = 5.0

_HINTS = {
    errno.EACCES: "let this user write to that folder",
    errno.EROFS: "let this host write to that disk",
    errno.EIO: "see whether that disk is in order: dmesg | tail",
    errno.EMFILE: "raise the limit that `ulimit -n` shows",
}


class Checkpoint(Observer):
    """A folder for a training's state, for ``collective.training.fit(..., checkpoint=...)``.

    Args:
        folder: A folder of its own for each training; it is created if missing. Or a URL,
            ``s3://bucket/run``: fsspec copies checkpoints there and back (``stores.py``).
        every: Steps between two checkpoints. If None, one at the end of each epoch.
            If that would take more than 5 % of the time, some are skipped. The last
            state of the training is always written.
        keep: The number of checkpoints that are kept.
        resume: Whether to continue from the newest checkpoint that is valid and belongs to
            this training; without any checkpoint, the training begins at its start.
            "anyway" allows another model, loss, optimizer or other data of the same shapes.

    Attributes:
        failed: The reason why the last checkpoint could not be written, or None.
        raises: Whether ``fit`` raises an error for that, after the training.

    Raises:
        UsageError: If ``every`` or ``keep`` is below 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int = 3,
        resume: bool | Literal["anyway"] = False,
    ):
        if keep < 1 or (every is not None and every < 1):
            raise UsageError(
                "checkpoints are written every 1 or more steps, and 1 or more are kept",
                hint="--checkpoint-every 100; Checkpoint(folder, every=100, keep=3)",
            )
        self._store = stores.make(folder)
        self.folder = self._store.folder
        self.every = every
        self.keep = keep
        self.resume = resume
        self.failed: str | None = None
        self.raises = True
        self._training: Mapping[str, str] | None = None
        self._known: list[Path] = []  # the last checkpoints, oldest first
        self._buffers: list[np.ndarray] | None = None
        self._not_before = 0.0
        self._skipped = 0
        self._thread: threading.Thread | None = None
        self._lock: int | None = None

    def attach(
        self,
        position: Position,
        plan: Mapping[str, Any],
        before_write: Callable[[], None] | None = None,
        training: Mapping[str, str] | None = None,
    ) -> None:
        """Begin to serve a training.

        Args:
            before_write: Called before each checkpoint, in the thread that writes it.
            training: Describes the training of the checkpoints (``identity.py``).
        """
        self._training = training
        self._position = position
        self._plan = plan
        self._before_write = before_write
        self._writes = False  # this process is rank 0 and has the folder
        self._epoch_end = 0

    def find_start(self) -> None:
        """Set the position's ``start``, on rank 0, unless it has one already.

        This is called once, before the observers begin. If the launcher has restarted the
        job, it resumes even if the user did not ask for that.

        Raises:
            UsageError: The folder cannot be used in the way that was asked for.
        """
        position, backend = self._position, self._position.backend
        if not backend.elastic:
            recorder.advise(self._advice)
        if backend.rank or backend.joins:
            return
        self._take_over()
        if position.start is None:
            self._known = []
            resumes = bool(self.resume) or generations.number() > 0
            position.start = self._newest(position.model, self._plan, resumes)

    def _advice(self) -> str:
        """Return the checkpoint's line for a dump, empty if there is no checkpoint yet."""
        if not storage.saved_in(self.folder):
            return ""
        resume = "again" if self.resume else "with --resume"
        return (
            f"the same command {resume} continues from {self._store.shown(self.folder)}"
        )

    def reconfigured(self, root: int) -> None:
        """Take over the folder, on a new rank 0."""
        if self._position.backend.rank == 0 and not self._writes:
            self._take_over()

    def _take_over(self) -> None:
        self._open_folder()
        self._known = storage.saved_in(self.folder)[: self.keep][::-1]
        self._writes = True

    def begin_epoch(self, epoch: int, first: int, last: int) -> None:
        """Note the last step of the epoch."""
        self._epoch_end = last

    def after_step(self, step: FinishedStep) -> None:
        """Write the state if it is due, but not at the end of an epoch."""
        position = self._position
        within = position.step < self._epoch_end and not position.stopped
        if self.every is not None and within:
            self._save_if_due()

    def between_epochs(self) -> None:
        """Write the state if it is due."""
        self._save_if_due()

    def _save_if_due(self) -> None:
        if self.every is None or self._position.step % self.every == 0:
            gathered = self._position.unit(self._position.gather)  # a collective
            if self._writes:
                self._save(gathered)

    def _save(self, gathered: Gathered) -> None:
        """Write the state in the background, or skip it if that costs too much."""
        begin = time.perf_counter()
        writing = self._thread is not None and self._thread.is_alive()
        if writing or begin < self._not_before:
            self._skipped += 1
            return
        state = self._position.take(self._buffers, gathered)
        if self._buffers is None:
            self._buffers = [np.array(value) for value in state.variables]
        taken = time.perf_counter() - begin

        def write() -> None:
            self._write(state)
            # Writing counts as if the step waited for it: it takes memory bandwidth, too.
            cost = taken + time.thread_time()
            self._not_before = begin + cost / PART_OF_TIME

        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def end_epochs(self) -> None:
        """Write the last state."""
        assert self._position.final is not None
        self.save_last(self._position.final)

    def save_last(self, state: State) -> None:
        """Write a state on rank 0, and return when it is on the disk."""
        if not self._writes:
            return
        self.wait()
        self._write(state)
        if self._skipped:
            s = "" if self._skipped == 1 else "s"
            were = "was" if self._skipped == 1 else "were"
            _warn(
                f"{self._skipped} checkpoint{s} {were} skipped: all would have taken more "
                f"than {PART_OF_TIME:.0%} of the time",
                hint="a larger --checkpoint-every; or leave it so",
            )

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Wait as ``wait`` does, and unlock the folder for another process."""
        self.wait()
        if self._lock is not None:
            self._store.close()
            os.close(self._lock)
            self._lock = None

    def _write(self, state: State) -> None:
        try:
            self._keep_lock()
            if self._before_write is not None:
                self._before_write()
            position, training = self._position, self._training
            path = storage.write(
                state, position.model, self._plan, self.folder, training
            )
            self._store.publish(path)
        except Exception as error:
            self._report_failure(state.step, error)
            return
        self.failed = None
        self._known = [p for p in self._known if p != path] + [path]
        while len(self._known) > self.keep:
            self._store.remove(self._known.pop(0))

    def raise_if_failed(self) -> None:
        """Raise the error of the last write; call it when the work is done.

        Raises:
            CollectiveError: The last checkpoint could not be written; on rank 0. The model
                is trained.
        """
        if self.failed is None:
            return
        membership_file.write_state(membership_file.DONE)
        raise CollectiveError(
            f"the last checkpoint was not written: {self.failed}",
            hint="the model is trained: save it elsewhere; or see the warning above, "
            "then --resume",
            everywhere=False,
        )

    def _report_failure(self, step: int, error: Exception) -> None:
        self.failed = first_line(error)
        self._known = [path for path in self._known if path.exists()]
        last = f"{self._known[-1].name} is the last" if self._known else "none is"
        hint = "see what model.save_weights says of this model"
        if isinstance(error, CollectiveError):
            self.failed, hint = error.message, error.hint
        elif isinstance(error, OSError):
            hint = _HINTS.get(error.errno or 0, "free some space on that disk")
            if not self.folder.is_dir():
                hint = "the folder was removed: make it again"
        _warn(
            f"the checkpoint of step {step} could not be written to "
            f"{self._store.shown(self.folder)}: {self.failed}; {last} there; the training continues",
            hint=hint,
        )

    def _open_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_folder()
            self._store.open()
            usable = os.access(self.folder, os.R_OK | os.W_OK | os.X_OK)
            reason = "no permission"
        except OSError as error:
            usable, reason = False, error.strerror or str(error)
        if not usable:
            raise UsageError(
                f"checkpoints cannot be written to {self._store.shown(self.folder)}: "
                + reason,
                hint="--checkpoint-dir DIR that can be made and written to",
                everywhere=False,
            )

    def _lock_folder(self) -> None:
        """Keep other processes out while this one lives, or until ``close``."""
        if self._lock is not None:
            return
        path = self.folder / LOCK
        deadline = Deadline(PATIENCE_SECONDS)
        while True:
            if path.is_symlink():
                path.unlink(missing_ok=True)  # never ours; a file in its place is
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = os.open(path, flags, 0o600)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_same(path, lock):  # a cleaner has just removed it
                    os.close(lock)
                    continue
            except (BlockingIOError, PermissionError):
                holder = _holder(lock)
                os.close(lock)
                if holder and processes.kill_is_pending(holder):
                    path.unlink(missing_ok=True)  # it never writes again
                    continue
                if not deadline.passed():
                    time.sleep(0.1)
                    continue
                raise UsageError(
                    f"another training writes its checkpoints to "
                    f"{self._store.shown(self.folder)}",
                    hint="one --checkpoint-dir for each training that runs at a time",
                    everywhere=False,
                ) from None
            except OSError:
                pass  # this file system has no locks
            self._lock = lock
            return

    def _keep_lock(self) -> None:
        """Lock the folder again if a cleaner has removed the file."""
        if self._lock is not None and not _is_same(self.folder / LOCK, self._lock):
            os.close(self._lock)
            self._lock = None
        self._lock_folder()

    def _newest(
        self, model: keras.Model, plan: Mapping[str, Any], resumes: bool
    ) -> State | None:
        shown = self._store.shown
        found = storage.saved_in(self.folder)
        if found and not resumes:
            raise UsageError(
                f"{shown(self.folder)} has checkpoints already, up to {found[0].name}",
                hint="--resume continues from there; or another --checkpoint-dir",
                everywhere=False,
            )
        reason = ""
        for place, path in enumerate(found):
            try:
                self._store.fetch(path)
                anyway = self.resume == "anyway"
                state, message = storage.read(path, model, plan, self._training, anyway)
            except storage.OtherTraining as error:
                raise UsageError(
                    f"{shown(path)} is of another training: {error}",
                    hint="type what it was made with, or another --checkpoint-dir; "
                    '--resume-anyway (resume="anyway") continues from it as it is, and '
                    f"model.load_weights({str(path / storage.WEIGHTS)!r}) takes its "
                    "weights alone",
                    everywhere=False,
                ) from None
            except storage.Unusable as error:
                reason = reason or f"{path.name}: {error}"
                _warn(f"{shown(path)} is not used: {error}")
                continue
            self._known = found[place:][::-1]
            print(
                f"resumed from {shown(path)}: epoch {state.epoch + 1}, step {state.step}"
            )
            if message:
                _warn(f"resumed from {shown(path)}: {message}")
            return state
        if found:
            raise UsageError(
                f"no checkpoint in {shown(self.folder)} can be used ({reason})",
                hint="type the options it was made with, or another --checkpoint-dir",
                everywhere=False,
            )
        if resumes:
            print(
                f"no checkpoint in {shown(self.folder)} yet: starting at step 0",
                flush=True,
            )
        return None


def _holder(lock: int) -> int:
    """Return the process of this host that has locked a file; 0 if it is not known."""
    layout = "hhqqi4x"  # struct flock: type, whence, start, length, process
    asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        found = struct.unpack(layout, fcntl.fcntl(lock, fcntl.F_GETLK, asked))
    except (OSError, struct.error):
        return 0
    return 0 if found[0] == fcntl.F_UNLCK else max(found[4], 0)


def _is_same(path: Path, opened: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(opened))
    except FileNotFoundError:
        return False


def _warn(what: str, hint: str = "") -> None:
    log.warning(printable(what) + (f"\nHINT: {hint}" if hint else ""))
