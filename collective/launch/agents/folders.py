"""The folder of a job on a node, for Ray and Spark: the last process that uses it removes it.

Nodes may share the disk, and on a node the agent that takes the place of a lost one may
start before that one has ended. In an elastic job of Ray the folder also says how many
ranks each node may have now.
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

_SLOTS = "slots"  # the file of them


def of(name: str) -> Path:
    """Returns the path of a job's folder, which need not exist."""
    return Path(tempfile.gettempdir(), f"collective-{name}")


def make(name: str) -> Path:
    """Makes the folder of a job, for this user alone, if it is missing; returns its path.

    Raises:
        CollectiveError: It is a link, another user's, or others can write it.
    """
    folder = of(name)
    private_files.folder(folder)
    return folder


@contextlib.contextmanager
def used(folder: Path) -> Iterator[None]:
    """Makes the folder if it is missing, and removes it at the end if no other uses it.

    Raises:
        CollectiveError: As of ``make``.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):  # it is being removed
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
    """Removes the folder, unless it is used."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
        lock = _open(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            gone = folder.with_suffix(".old")  # files may be written to it meanwhile
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        finally:
            os.close(lock)


def _open(folder: Path) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(folder, flags)


def write_slots(folder: Path, slots: Mapping[int, int]) -> None:
    """Tells the head of the job of this folder, if there is one here, the slots by node."""
    part = folder / f"{_SLOTS}.part"
    with contextlib.suppress(FileNotFoundError):
        part.write_text(json.dumps({str(node): count for node, count in slots.items()}))
        part.replace(folder / _SLOTS)


def read_slots(folder: Path | None) -> dict[int, int] | None:
    """Returns what was written last; None if the nodes keep the slots that they began with."""
    if folder is None:
        return None
    try:
        found = json.loads((folder / _SLOTS).read_text())
    except FileNotFoundError:
        return None
    return {int(node): count for node, count in found.items()}
