"""Ends what a rank has started with it, daemons included.

A signal to a process group does not reach a process that has called ``setsid``. So each
rank has a mark of its own in its environment, which all that it starts inherits, and what
still has the mark when the rank has ended is killed. This needs no privileges and no
cgroup, and works when the launcher itself was killed.

What is to outlive the job is started without the mark: ``env -u COLLECTIVE_CONTAINED
program``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from pathlib import Path

VARIABLE = "COLLECTIVE_CONTAINED"


class Marks:
    """The marks of the ranks that one supervisor starts.

    Attributes:
        job: What all of them begin with.
    """

    def __init__(self) -> None:
        self.job = secrets.token_hex(16)
        self._made = 0

    def make(self) -> str:
        """Returns the mark of the next rank: the value of ``VARIABLE``."""
        self._made += 1
        return f"{self.job}.{self._made}."


def find(mark: str) -> set[int]:
    """Returns the processes of this user whose mark begins so; zombies have none."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        # It may have ended, or belong to another user.
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{name}/environ").read_bytes()
            if any(each.startswith(wanted) for each in variables.split(b"\0")):
                found.add(int(name))
    return found


def kill(mark: str) -> None:
    """Kills every process whose mark begins so, and what these start meanwhile."""
    killed: set[int] = set()
    while found := find(mark) - killed:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
