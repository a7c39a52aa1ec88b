"""Records what collectives this process runs, as a Chrome trace.

The core writes it: open it at chrome://tracing or https://ui.perfetto.dev.
"""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any

from collective import library

# A trace grows no larger: about 400,000 collectives.
LIMIT_BYTES = 64 << 20


def start(path: str | os.PathLike[str], limit_bytes: int = LIMIT_BYTES) -> None:
    """Begins to record; what was recorded into another file before is kept.

    Args:
        path: The file; overwritten.
        limit_bytes: Nothing is added that would make it larger.

    Raises:
        UsageError: If the file cannot be written.
    """
    library.check(
        library.load().collective_timeline_start(
            os.fsencode(path), ctypes.c_int64(limit_bytes), os.getpid()
        )
    )


def stop() -> None:
    """Ends the recording, if there is one."""
    library.load().collective_timeline_stop()


class Recording:
    """Collectives kept in memory until they are taken, instead of in a file.

    Their times are those of ``time.perf_counter``: both clocks are the monotonic one.
    """

    # What has been taken is dropped when it is as large as this.
    KEPT_BYTES = 1 << 20

    def __init__(self) -> None:
        self._file = os.memfd_create("timeline")
        self._path = f"/proc/self/fd/{self._file}"
        self._taken = 0
        start(self._path)

    def take(self) -> list[dict[str, Any]]:
        """The events since the last call, as the trace has them, in order of their end.

        Returns:
            Of each, among others, ``name``, ``ts`` and ``dur`` in microseconds, and in
            ``args`` ``bytes`` and ``call``.
        """
        size = os.fstat(self._file).st_size
        text = os.pread(self._file, size - self._taken, self._taken)
        events = []
        for line in text.splitlines(keepends=True):
            text = line.strip(b",\n")
            try:
                event = {} if text in (b"", b"[") else json.loads(text)
            except ValueError:  # the closing bracket, or what is being written now
                break
            self._taken += len(line)
            if event.get("ph") == "X":
                events.append(event)
        if self._taken > self.KEPT_BYTES:
            self._taken = 0
            start(self._path)
        return events

    def close(self) -> None:
        """Ends the recording."""
        stop()
        os.close(self._file)
