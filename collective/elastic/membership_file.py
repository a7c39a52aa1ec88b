"""What ranks and the launcher of a job whose ranks come and go tell each other.

A byte for each rank that was ever started, in memory of the launcher that ranks open
through ``/proc``: it has no name of its own, and ends with the launcher.
"""

from __future__ import annotations

import contextlib
import functools
import os

VARIABLE = "COLLECTIVE_BOARD"
# As a rank tells it: it is in the job; it has left it, and the others go on.
JOINED, LEFT = b"j", b"l"
# As the launcher tells the others (``native/membership/exited_ranks.cc``): it has ended.
ENDED = b"e"
# As the launcher tells a rank: all are to end, and to be started anew on other hosts
# (``collective.elastic.generations``).
RENEW = b"r"


class Board:
    """The launcher's side.

    Args:
        size: Number of ranks that are started at once.

    Attributes:
        path: Where ranks find it: the value of ``VARIABLE``.
    """

    def __init__(self, size: int) -> None:
        self._file = os.memfd_create("collective board", os.MFD_CLOEXEC)
        os.ftruncate(self._file, size)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def told(self, rank: int) -> bytes:
        """What a rank, by the number it was started with, told last; or ``b""``."""
        return os.pread(self._file, 1, rank).strip(b"\0")

    def ask_to_renew(self, rank: int) -> None:
        """Asks a rank, which has told something, for a new round."""
        os.pwrite(self._file, RENEW, rank)

    def note_end(self, rank: int) -> None:
        """Tells the other ranks that one has ended."""
        os.pwrite(self._file, ENDED, rank)


def tell(word: bytes) -> None:
    """As a rank; does nothing where no launcher asks."""
    with contextlib.suppress(OSError):
        os.pwrite(_opened(os.environ.get(VARIABLE, "")), word, _number())


def told() -> bytes:
    """What this rank was told, or has told itself; or ``b""``."""
    with contextlib.suppress(OSError):
        board = _opened(os.environ.get(VARIABLE, ""))
        return os.pread(board, 1, _number()).strip(b"\0")
    return b""


@functools.cache  # a training asks before each step
def _opened(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _number() -> int:
    return int(os.environ.get("COLLECTIVE_RANK", "0"))
