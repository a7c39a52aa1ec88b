"""Ends everything that an agent has started when the agent ends or is killed.

Each process that the agent starts inherits a mark (``containment``). When the agent ends,
every process that still has the mark is ended; if it is killed, its watchdog does so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from collective.launch import containment, processes
from collective.launch.agents import folders
from collective.running_time import Deadline

_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
SHARED_MEMORY = Path("/dev/shm")


def guarded(main: Callable[[], int], folder: Path | None = None) -> int:
    """Run a function; return its exit code when all its processes have ended.

    Args:
        folder: Folder of the job; removed if no other process uses it any more.
    """
    os.environ[containment.VARIABLE] = containment.Marks().job
    began = time.time()

    def clean() -> None:
        end_all()
        remove_files(began)
        if folder is not None:
            folders.remove(folder)

    watchdog = processes.Watchdog(clean)
    try:
        return main()
    finally:
        clean()
        watchdog.close()


def end_all() -> None:
    """End all processes of this agent: by SIGTERM, after a while by SIGKILL."""
    mark = os.environ[containment.VARIABLE]
    for end in (_terminate, containment.kill):
        end(mark)
        deadline = Deadline(_GRACE_SECONDS)
        while containment.find(mark) and not deadline.passed():
            time.sleep(_POLL_SECONDS)


def _terminate(mark: str) -> None:
    for pid in containment.find(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def remove_files(since: float) -> None:
    """Remove files of processes of Open MPI that were killed before they could do so.

    These are shared memory that no process maps, and session folders of processes that
    have ended, if they belong to this user and were made since then.
    """
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {
                line.rpartition("/")[2]
                for line in maps.read_text().splitlines()
                if "/sm_segment." in line
            }
    for file in SHARED_MEMORY.glob("sm_segment.*"):
        if file.name not in mapped and _is_ours(file, since):
            file.unlink(missing_ok=True)
    for folder in Path(tempfile.gettempdir()).glob("*.*"):
        program, _, owner = folder.name.rpartition(".")
        if program not in ("ompi", "prted", "prterun", "prte"):
            continue
        ended = owner.isdigit() and processes.has_ended(int(owner))
        if ended and _is_ours(folder, since):
            shutil.rmtree(folder, ignore_errors=True)


def _is_ours(path: Path, since: float) -> bool:
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found.st_uid == os.geteuid() and found.st_mtime >= since - 1
    return False
