"""What ranks tell the launcher of a job whose ranks come and go.

A byte for each rank that was ever started, in memory of the launcher that ranks open
through ``/proc``: it has no name of its own, and ends with the launcher.
"""

from __future__ import annotations

import contextlib
import os

VARIABLE = "COLLECTIVE_BOARD"
# A rank that came later is in the job; a rank has left it, and the others go on.
JOINED, LEFT = b"j", b"l"


class Board:
    """The launcher's side.

    Attributes:
        path: Where ranks find it: the value of ``VARIABLE``.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("collective board", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def told(self, rank: int) -> bytes:
        """What a rank, by the number it was started with, told last; or ``b""``."""
        return os.pread(self._file, 1, rank).strip(b"\0")


def tell(word: bytes) -> None:
    """As a rank; does nothing where no launcher asks."""
    path, rank = os.environ.get(VARIABLE), os.environ.get("COLLECTIVE_RANK")
    if not path or rank is None:
        return
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as board:
        board.seek(int(rank))
        board.write(word)
