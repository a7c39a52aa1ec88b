"""Records the collectives of this process: as a Chrome trace, or in memory.

The core writes the trace: open it at chrome://tracing or https://ui.perfetto.dev.
"""

from __future__ import annotations

import ctypes
import os

from collective import library
from collective.errors import UsageError
from collective.net import private_files

# A trace grows no larger: about 400,000 collectives.
LIMIT_BYTES = 64 << 20
_AT_A_TIME = 1000  # events that are taken from the core


def start(path: str | os.PathLike[str], limit_bytes: int = LIMIT_BYTES) -> None:
    """Begin to record. A recording into another file ends and is kept.

    Args:
        path: The file; overwritten.
        limit_bytes: Nothing is added that would make it larger.

    Raises:
        UsageError: If the file cannot be written.
    """
    core = library.load()
    try:
        opened = private_files.open_output(path)
        os.ftruncate(opened, 0)
    except OSError as error:
        raise UsageError(
            f"cannot write the timeline {os.fspath(path)}: {error.strerror}",
            hint="give a file in a folder that exists and is writable",
            everywhere=False,
        ) from None
    core.collective_timeline_start(opened, ctypes.c_int64(limit_bytes), os.getpid())


def stop() -> None:
    """End the recording, if there is one."""
    library.load().collective_timeline_stop()


def record_in_memory(on: bool) -> None:
    """Begin or end to record collectives in memory, until ``take``."""
    library.load().collective_timeline_keep(on)


def take() -> list[tuple[float, float, int]]:
    """Return the collectives recorded since the last call, in the order of their ends.

    Returns:
        For each collective, when it began and ended, in seconds of
        ``time.perf_counter`` (both clocks are the monotonic one), and its bytes.
    """
    taken = []
    events = (ctypes.c_int64 * 3 * _AT_A_TIME)()
    while count := library.load().collective_timeline_take(events, _AT_A_TIME):
        taken += [(begin / 1e9, end / 1e9, size) for begin, end, size in events[:count]]
    return taken
