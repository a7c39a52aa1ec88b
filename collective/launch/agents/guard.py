"""Nothing outlives an agent: not daemons that it has started, nor if it is killed.

An agent is two processes. Each is a reaper: a daemon whose parent ends becomes its child. If
one of the two is killed, the other ends everything that is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from collective.launch.agents import folders
from collective.launch.processes import unless_nohup

_LIBC = ctypes.CDLL(None)
_PDEATHSIG, _SUBREAPER = 1, 36
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_GRACE_SECONDS = 5.0
SHARED_MEMORY = Path("/dev/shm")


def guarded(main: Callable[[], int], folder: Path | None = None) -> int:
    """Runs a function in a child; returns its exit code when nothing is left of it.

    Args:
        folder: Of the parent; removed here if the parent has ended before.
    """
    _LIBC.prctl(_SUBREAPER, 1)
    parent = os.getppid()
    guard, began = os.getpid(), time.time()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if child == 0:
        _LIBC.prctl(_PDEATHSIG, signal.SIGTERM)
        _LIBC.prctl(_SUBREAPER, 1)
        code = 1
        try:
            if os.getppid() == guard:  # else it was killed before prctl
                signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
                code = main()
        finally:
            if folder is not None and os.getppid() != guard:
                folders.remove(folder)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    for each in unless_nohup(FORWARDED):
        signal.signal(each, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = _wait(child)
    end_all()
    remove_files(began)
    if folder is not None and os.getppid() != parent:
        folders.remove(folder)
    return code


def _wait(child: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)  # daemons end as children of this process, too
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def end_all() -> None:
    """Ends all descendants of this process: by SIGTERM, then by SIGKILL."""
    import psutil

    for kill in (False, True, True):
        below = psutil.Process().children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.Error):
                if kill:
                    process.kill()
                else:
                    process.terminate()
        alive = psutil.wait_procs(below, timeout=_GRACE_SECONDS)[1]
        if not (alive or psutil.Process().children(recursive=True)):
            return


def remove_files(since: float) -> None:
    """Removes files of processes of Open MPI that were killed before they could do so.

    Shared memory that no process maps, and session folders of processes that have ended:
    of this user, and made since then.
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
        ended = owner.isdigit() and not Path("/proc", owner).exists()
        if ended and _is_ours(folder, since):
            shutil.rmtree(folder, ignore_errors=True)


def _is_ours(path: Path, since: float) -> bool:
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found.st_uid == os.geteuid() and found.st_mtime >= since - 1
    return False


def ends_with_parent() -> None:
    """Has this process get SIGTERM when its parent is killed; called before exec."""
    _LIBC.prctl(_PDEATHSIG, signal.SIGTERM)
