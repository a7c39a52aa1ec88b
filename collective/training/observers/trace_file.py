"""A Chrome trace file that the processes of one host write together.

Its format is the JSON array of the Trace Event Format, read by Perfetto and
chrome://tracing. The file is complete JSON after every write: one system call, under a
lock, writes events and the closing bracket over the old bracket. So a killed process
leaves a valid file; if it was killed during that call, the next writer repairs the file.
Its size is limited.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from collective.errors import UsageError
from collective.log import log
from collective.net import private_files

Event = dict[str, Any]
END = b"\n]\n"
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class TraceFile:
    """An open trace file.

    Args:
        limit_bytes: Maximum size; events beyond it are dropped.
        create: Whether to empty the file; otherwise events are appended.

    Raises:
        UsageError: On this rank, if the file cannot be written.
    """

    def __init__(self, path: str, limit_bytes: int, create: bool):
        self.path = path
        self.limit = limit_bytes
        try:
            self._file = private_files.open_output(path)
            if create:
                os.ftruncate(self._file, 0)
        except OSError as error:
            raise UsageError(
                f"the timeline cannot be written to {path}: {error.strerror}",
                hint="--timeline FILE in a folder that exists and is writable",
                everywhere=False,
            ) from error
        self.full = False

    def add(self, events: Sequence[Event]) -> None:
        """Add events, or a note if they would exceed the limit.

        A full disk, or one without locks, ends the trace, but not the training.
        """
        if self.full or not events:
            return
        reserve = min(self.limit // 8, 1 << 16)  # for a note of every process
        try:
            with self._locked():
                if not self._append(events, self.limit - reserve):
                    self.full = True
                    note = {**events[-1], "name": "the trace is full", "ph": "i"}
                    self._append([note], self.limit)
        except OSError as error:
            self.full = True
            log.warning("the timeline %s ends here: %s", self.path, error.strerror)

    def read(self) -> list[Event]:
        """Return every event so far."""
        with self._locked():
            text = os.pread(self._file, os.fstat(self._file).st_size, 0)
        return json.loads(text) if text else []

    def close(self) -> None:
        """Close the file; later events are dropped."""
        self.full = True
        os.close(self._file)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _append(self, events: Sequence[Event], limit: int) -> bool:
        """Append events; return False if they do not fit."""
        size = self._repaired(os.fstat(self._file).st_size)
        text = _ENCODER.encode(list(events))[1:-1]
        whole = (b",\n" if size else b"[\n") + text.encode() + END
        place = max(0, size - len(END))
        if place + len(whole) > limit:
            return False
        written = os.pwrite(self._file, whole, place)
        if written != len(whole):  # full disk: restore the former end
            os.ftruncate(self._file, size)
            os.pwrite(self._file, END[:size], place)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True

    def _repaired(self, size: int) -> int:
        """Return the size after removing an incomplete write of a killed process."""
        if not size or os.pread(self._file, len(END), size - len(END)) == END:
            return size
        text = os.pread(self._file, size, 0)
        whole = max(0, text.rfind(b",\n"))  # each write has this at its start only
        os.ftruncate(self._file, whole)
        return whole + os.pwrite(self._file, END[: whole and len(END)], whole)
