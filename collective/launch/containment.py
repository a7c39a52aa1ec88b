"""Ends what a rank has started with it, daemons included.

A signal to a process group does not reach a process that has called ``setsid``. So each
rank has a mark of its own in its environment, which all that it starts inherits, and what
still has the mark when the rank has ended is killed. This needs no privileges, and works
when the launcher itself was killed. A program that empties its environment and calls
``setsid`` has no mark any more, and stays.

What is to outlive the job is started with an empty mark: ``COLLECTIVE_CONTAINED= program``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "COLLECTIVE_CONTAINED"


class Marks:
    """The marks of the ranks that one supervisor starts."""

    def __init__(self) -> None:
        # What all of them begin with; behind the mark of a job around this one.
        self.job = os.environ.get(VARIABLE, "") + secrets.token_hex(16)
        self._made = 0

    def make(self) -> str:
        """Returns the mark of the next rank: the value of ``VARIABLE``."""
        self._made += 1
        return f"{self.job}.{self._made}."


def find(mark: str) -> set[int]:
    """Returns the processes of this user whose mark begins with this; zombies have no mark."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and any(each.startswith(wanted) for each in _variables(name)):
            found.add(int(name))
    return found


def _variables(pid: int | str) -> Iterator[bytes]:
    # It may have ended, or belong to another user.
    with contextlib.suppress(OSError):
        yield from Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def kill(mark: str) -> None:
    """Kills every process whose mark begins with this, and what these start meanwhile."""
    killed: set[int] = set()
    while found := find(mark) - killed:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
