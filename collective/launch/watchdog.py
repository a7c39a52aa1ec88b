"""Ends what the ranks started when the launcher itself is killed.

The kernel ends a rank with its launcher, but not what the rank started. So the launcher
forks a process that waits for its end: each rank leads a process group, and the watchdog
kills the groups that still exist.
"""

from __future__ import annotations

import contextlib
import os
import signal

from collective.launch.processes import signal_group

_CLOSE = "close\n"


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

    def add(self, group: int) -> None:
        """From now on this process group ends with the launcher."""
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """This group has ended; its number may soon be that of another."""
        self._send(f"-{group}\n")

    def close(self) -> None:
        """Ends the watchdog; nothing is killed."""
        self._send(_CLOSE)
        with contextlib.suppress(OSError):
            os.close(self._writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the watchdog was killed: do without
            os.write(self._writing, line.encode())


def _watch(reading: int) -> None:
    # What ends the launcher from a terminal must not end the watchdog first.
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    with os.fdopen(reading) as messages:
        for line in messages:
            if line == _CLOSE:
                return
            group = int(line[1:])
            if line[0] == "+":
                groups.add(group)
            else:
                groups.discard(group)
    for group in groups:
        signal_group(group, signal.SIGKILL)
