"""States of an unedited script in a folder: ``--resume FOLDER``.

A state is what the units of the script have returned so far, and the values of the variables
that its steps use. A job that resumes runs the script from its start, every unit answered
from the state, until it stands where the state was taken; see ``growth``. So it continues in
the middle of an epoch, on any number of ranks.

Rank 0 alone reads and writes the folder. A state is a file that is written under another
name and then renamed; its first line has the checksum of the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import re
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collective import disk
from collective.backends.base import Backend
from collective.environment.seconds import seconds
from collective.errors import UsageError, first_line
from collective.log import log
from collective.training.process.object_collectives import broadcast_object
from collective.training.unedited.record import Record

# States take at most this part of the time, and are no nearer to each other than this.
_PART_OF_TIME, _SECONDS = 0.05, 30.0
VARIABLE = "COLLECTIVE_RESUME_SECONDS"
_KEPT = 2  # states
_NAME = re.compile(r"script-(\d+)\.state")
_HEAD = "collective.script 1 {:08x}\n"


class Saved(NamedTuple):
    """A state of a script.

    Attributes:
        script: Identifies the script and its arguments.
        record: What its units have returned.
        variables: Shape and dtype of each variable that its steps use.
        values: Their values.
        kept: The best weights of each ``EarlyStopping`` of the call that ran.
    """

    script: str
    record: Record
    variables: list[tuple[tuple[int, ...], str]]
    values: Sequence[np.ndarray]
    kept: list[Any]


class StateFolder:
    """The folder of a script's states, on rank 0.

    Args:
        folder: Is made if it is missing.
        script: Identifies the script and its arguments.

    Raises:
        UsageError: ``COLLECTIVE_RESUME_SECONDS`` is no time.
    """

    def __init__(self, folder: str | os.PathLike[str], script: str):
        self.folder, self.script = Path(folder), script
        self._seconds = seconds(VARIABLE, _SECONDS)
        self._not_before = time.monotonic() + self._seconds
        self._lock: int | None = None
        self._is_failing = False

    def opened(self, backend: Backend) -> Saved | None:
        """Open the folder on rank 0; return the newest state, on every rank.

        Raises:
            UsageError: On every rank: the folder cannot be used.
        """
        found: Saved | UsageError | None = None
        if backend.rank == 0:
            try:
                self.open()
                found = self.newest()
            except UsageError as error:
                found = error
        if backend.size > 1:
            found = broadcast_object(backend, found)
        if isinstance(found, UsageError):
            raise found
        return found

    def open(self) -> None:
        """Make and lock the folder.

        Raises:
            UsageError: It cannot be written, or another job has it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(self.folder / ".lock", flags, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--resume {self.folder}: another job uses this folder",
                hint="wait until that has ended; or another folder",
            ) from None
        except OSError as error:
            raise UsageError(
                f"--resume {self.folder}: {error.strerror}",
                hint="a folder that this user may write",
            ) from None

    def newest(self) -> Saved | None:
        """Return the newest state that can be read, or None if there is none.

        Raises:
            UsageError: It is of another script.
        """
        for path in self._states():
            try:
                saved = _read(path)
            except Exception as error:
                log.warning("%s cannot be used: %s", path, first_line(error))
                continue
            if saved.script != self.script:
                raise UsageError(
                    f"--resume {self.folder}: it has the state of another script, of "
                    "other arguments, or of the script before it was edited",
                    hint="another folder; or remove this one",
                )
            return saved
        return None

    def _states(self) -> list[Path]:
        found = [p for p in self.folder.iterdir() if _NAME.fullmatch(p.name)]
        return sorted(found, key=lambda p: int(p.name[7:-6]), reverse=True)

    @property
    def is_due(self) -> bool:
        """Return whether it is time for the next state."""
        return time.monotonic() >= self._not_before

    def write(self, saved: Saved) -> None:
        """Write a state; if that fails, warn once, and try again later."""
        begin = time.monotonic()
        path = self.folder / f"script-{len(saved.record):09d}.state"
        part = path.with_suffix(".part")
        try:
            body = pickle.dumps(saved, protocol=5)
            with part.open("wb") as file:
                file.write(_HEAD.format(zlib.crc32(body)).encode())
                file.write(body)
                file.flush()
                disk.sync(file.fileno())
            part.rename(path)
            disk.sync_folder(self.folder)
            for old in self._states()[_KEPT:]:
                old.unlink()
            self._is_failing = False
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            if not self._is_failing:
                log.warning("no state was written: %s: %s", path, error.strerror)
            self._is_failing = True
        took = time.monotonic() - begin
        self._not_before = begin + max(self._seconds, took / _PART_OF_TIME)


def _read(path: Path) -> Saved:
    head, _, body = path.read_bytes().partition(b"\n")
    if head + b"\n" != _HEAD.format(zlib.crc32(body)).encode():
        raise ValueError("it is torn: its checksum is another")
    saved = pickle.loads(body)
    if not isinstance(saved, Saved):
        raise ValueError("it is not the state of a script")
    return saved


def identify(file: str, arguments: Sequence[str]) -> str:
    """Return what identifies a script: its content and its arguments."""
    with contextlib.suppress(OSError):
        return f"{zlib.crc32(Path(file).read_bytes()):08x} {list(arguments)!r}"
    return repr([file, *arguments])
