"""Records what collectives this process runs, as a Chrome trace.

The core writes it: open it at chrome://tracing or https://ui.perfetto.dev.
"""

from __future__ import annotations

import ctypes
import os

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
