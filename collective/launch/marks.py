"""A byte for each of some ranks, which launcher and ranks share without a file."""

from __future__ import annotations

import contextlib
import mmap
import os

# Of all ranks of a host: those that have ended (``native/ended.h``).
ENDED = "COLLECTIVE_ENDED"
# Of one rank: that it has met the others.
JOINED = "COLLECTIVE_JOINED"


class Marks:
    """Memory with a path for processes of the same user, while this one lives.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int):
        self._file = os.memfd_create("collective-marks")
        os.ftruncate(self._file, size)
        self._bytes = mmap.mmap(self._file, size)

    @property
    def path(self) -> str:
        """What a variable in the ranks' environment says."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def set(self, rank: int) -> None:
        """Marks a rank."""
        self._bytes[rank] = 1

    def __getitem__(self, rank: int) -> bool:
        return self._bytes[rank] != 0


def joined() -> None:
    """In a rank: it has met the others, and MPI can go on without it from now on."""
    if JOINED in os.environ:
        with contextlib.suppress(OSError), open(os.environ[JOINED], "r+b") as mark:
            mark.write(b"\1")
