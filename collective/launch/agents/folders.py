"""The folder of a job on a node, for Ray and Spark: the last process that uses it removes it.

Nodes may share the disk, and the agent that replaces a lost agent of its node may start
before the lost one has ended. In an elastic job of Ray the folder also says how many ranks
each node may have now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from collective.net import private_files

_SLOTS = "slots"  # name of the file with the slots of each node


def of(name: str) -> Path:
    """Return the path of a job's folder, which need not exist."""
    return Path(tempfile.gettempdir(), f"collective-{name}")


def make(name: str) -> Path:
    """Make the folder of a job, for this user alone, if it is missing; return its path.

    Raises:
        CollectiveError: It is a link, belongs to another user, or others can write it.
    """
    folder = of(name)
    private_files.folder(folder)
    return folder


@contextlib.contextmanager
def used(folder: Path) -> Iterator[None]:
    """Make the folder if it is missing, and remove it at the end if no other process uses it.

    Raises:
        CollectiveError: As for ``make``.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):  # another process is removing it
            private_files.folder(folder)
            lock = _open(folder)
            fcntl.flock(lock, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), folder.stat()):
                    break
            os.close(lock)
    try:
        yield
    finally:
        os.close(lock)
        remove(folder)


def remove(folder: Path) -> None:
    """Remove the folder, unless a process uses it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
        lock = _open(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may still write files to it.
            gone = folder.with_suffix(".old")
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        finally:
            os.close(lock)


def _open(folder: Path) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(folder, flags)


def write_slots(folder: Path, slots: Mapping[int, int]) -> None:
    """Write the slots by node for the head of this job, if the head is on this host."""
    part = folder / f"{_SLOTS}.part"
    with contextlib.suppress(FileNotFoundError):
        part.write_text(json.dumps({str(node): count for node, count in slots.items()}))
        part.replace(folder / _SLOTS)


def read_slots(folder: Path | None) -> dict[int, int] | None:
    """Return the slots that were written last; None if the nodes keep their first ones."""
    if folder is None:
        return None
    try:
        found = json.loads((folder / _SLOTS).read_text())
    except FileNotFoundError:
        return None
    return {int(node): count for node, count in found.items()}
