"""Ends what the ranks started when the launcher itself is killed.

A rank dies with its launcher by the kernel's own doing, but not what the rank started.
So the launcher forks a process that does nothing but wait for its end: each rank leads
a process group, and the watchdog kills the groups that are still there.
"""

from __future__ import annotations

import contextlib
import os
import signal


class Watchdog:
    """A process that outlives this one by a moment. Make it before any thread."""

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writing)
                _watch(reading)
            finally:
                os._exit(0)
        os.close(reading)

    @property
    def pid(self) -> int:
        """The watchdog's own process."""
        return self._pid

    def add(self, group: int) -> None:
        """From now on this process group is to die with the launcher."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """This group has ended; its number may come to mean another."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """Ends the watchdog; nothing is killed."""
        self._say("bye\n")
        with contextlib.suppress(OSError):
            os.close(self._writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it was killed: then it does without
            os.write(self._writing, line.encode())


def _watch(reading: int) -> None:
    # What ends the launcher from a terminal must not end the watchdog first.
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    with os.fdopen(reading) as said:
        for line in said:
            if line == "bye\n":
                return
            group = int(line[1:])
            if line[0] == "+":
                groups.add(group)
            else:
                groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
