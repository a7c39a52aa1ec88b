"""Ends all processes that a rank has started when the rank ends, daemons included.

A signal to a process group does not reach a process that has called ``setsid``. So each
rank has a mark of its own in its environment. All processes that it starts inherit the mark,
and those that still have it when the rank has ended are killed. This works without
privileges, and also when the launcher itself was killed. A program that empties its
environment and calls ``setsid`` loses the mark, and stays.

Start a program with an empty mark if it should outlive the job:
``COLLECTIVE_CONTAINED= program``.
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
        # All marks begin with this. It follows the mark of a job around this one.
        self.job = os.environ.get(VARIABLE, "") + secrets.token_hex(16)
        self._made = 0

    def make(self) -> str:
        """Return the mark of the next rank: the value of ``VARIABLE``."""
        self._made += 1
        return f"{self.job}.{self._made}."


def find(mark: str) -> set[int]:
    """Return the processes of this user whose mark begins with this; a zombie has none."""
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
    """Kill every process whose mark begins with this, and all that these start before they die."""
    killed: set[int] = set()
    while found := find(mark) - killed:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
