"""Reports between the launcher and the ranks of a job on one host.

It has a byte for each rank that was ever started. It lies in memory of the launcher,
which ranks open through ``/proc``: it has no name of its own, and ends with the
launcher.

The variable that names it may outlive the job, for example in a daemon that a rank has
started. Its path then leads to a file of another program. So the value contains the
file's inode, which is compared before the file is opened, and the file begins with a
header, which is compared before anything is written.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import stat

from collective.errors import UsageError

VARIABLE = "COLLECTIVE_BOARD"
# Written by a rank: it waits for the other ranks to join; it is in the job; it has left
# the job, which continues; its work has ended, so that no other rank repeats work that
# fails now.
JOINING, JOINED, LEFT, DONE = b"w", b"j", b"l", b"d"
# Written by a rank of a job that may restart (``collective.elastic.generations``): it
# has all but the state of the previous generation, and waits for it; its training may
# be handed over.
READY, TRAINS = b"p", b"t"
# Written by such a rank: the state is kept for the next generation, and the rank ends.
HANDED_OVER = b"h"
IN_JOB = (JOINED, TRAINS)
# Written by a rank that raises KeyboardInterrupt in the script, which may catch it: the
# launcher lets it.
INTERRUPTED = b"i"
# Written by a rank that was in the job: its interpreter ends.
EXITING = b"x"
OVER = (LEFT, DONE, EXITING, HANDED_OVER)
# Written by the launcher for other ranks (``native/rendezvous/launcher_files.cc``): the
# rank has exited.
EXITED = b"e"
# Written by the launcher for the rank: all ranks must end, and the job restarts on
# other hosts (``collective.elastic.generations``).
RESTART = b"r"
HEADER = b"collective file\n"  # as in launcher_files.cc


class MembershipFile:
    """The launcher's side.

    Args:
        size: Number of ranks that are started at once.
        first: Number of the first of these ranks.

    Attributes:
        path: The path by which ranks find it: the value of ``VARIABLE``.
    """

    def __init__(self, size: int, first: int = 0) -> None:
        self._file, self.path = new_memory("collective membership", size)
        self._begin = len(HEADER) - first

    def read(self, rank: int) -> bytes:
        """Return the state of a rank, by its launch number; at first ``b""``."""
        return os.pread(self._file, 1, self._begin + rank).strip(b"\0")

    def has_joined(self, rank: int) -> bool:
        """Return whether a rank has ever been in the job."""
        return self.read(rank) not in (b"", JOINING)

    def ask_to_restart(self, rank: int) -> None:
        """Ask a rank to end for the next generation, if it is in the job now."""
        if self.read(rank) in IN_JOB:
            os.pwrite(self._file, RESTART, self._begin + rank)

    def release(self, rank: int) -> None:
        """Let a rank continue that is ready for the state."""
        os.pwrite(self._file, JOINED, self._begin + rank)

    def note_exit(self, rank: int) -> None:
        """Report to the other ranks that one rank has exited."""
        os.pwrite(self._file, EXITED, self._begin + rank)


def new_memory(name: str, size: int) -> tuple[int, str]:
    """Return a descriptor of new memory, and the value by which ranks open it.

    ``size`` bytes follow the header.

    Raises:
        UsageError: A limit of this process does not allow it.
    """
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(file, len(HEADER) + size)
        os.pwrite(file, HEADER, 0)
    except OSError as error:
        raise UsageError(
            f"no memory can be shared with the ranks: {error.strerror}",
            hint="ulimit -f unlimited; ulimit -n 1024",
        ) from None
    return file, f"/proc/{os.getpid()}/fd/{file}:{os.fstat(file).st_ino}"


def open_memory(value: str) -> int:
    """Return a descriptor of a launcher's memory; raise OSError if it is gone."""
    path, _, inode = value.rpartition(":")
    _check_inode(os.stat(path), inode)
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _check_inode(os.fstat(file), inode)
        if os.pread(file, len(HEADER), 0) != HEADER:
            raise FileNotFoundError(f"{path} is not a file of a launcher")
    except OSError:
        os.close(file)
        raise
    return file


_open = functools.cache(open_memory)  # a training reads it before each step


def _check_inode(found: os.stat_result, inode: str) -> None:
    if not stat.S_ISREG(found.st_mode) or str(found.st_ino) != inode:
        raise FileNotFoundError("the launcher has ended, and another file has its path")


def write_state(state: bytes) -> None:
    """Write the state of this rank; do nothing without our launcher."""
    with contextlib.suppress(OSError):
        os.pwrite(_open(os.environ.get(VARIABLE, "")), state, _position())
        if state == JOINED:
            _note_end(os.getpid())


def read_state() -> bytes:
    """Return the state of this rank, as it or the launcher wrote it; or ``b""``."""
    with contextlib.suppress(OSError):
        file = _open(os.environ.get(VARIABLE, ""))
        return os.pread(file, 1, _position()).strip(b"\0")
    return b""


def count_exited() -> int:
    """Return how many ranks of an elastic job have exited, as the launcher wrote it."""
    with contextlib.suppress(OSError):
        file = _open(os.environ.get(VARIABLE, ""))
        states = os.pread(file, os.fstat(file).st_size, len(HEADER))
        return states.count(EXITED)
    return 0


@functools.cache  # once
def _note_end(process: int) -> None:
    def note() -> None:
        if os.getpid() == process and read_state() in IN_JOB:  # not in a fork
            write_state(EXITING)

    atexit.register(note)


def _position() -> int:
    return len(HEADER) + int(os.environ.get("COLLECTIVE_RANK", "0"))
