"""Standard input of an unedited script: rank 0 reads, and every rank gets what it has read.

The launcher gives its standard input to rank 0. So ``input()``, ``sys.stdin.read()`` and
whatever else reads ``sys.stdin`` return on every rank what they would return in one process.
"""

from __future__ import annotations

import io
import os
import pdb
import sys
import threading
from collections.abc import Callable
from typing import Any

from collective.errors import UsageError
from collective.training.process.object_collectives import broadcast_object
from collective.training.unedited.script_job import INPUT, ScriptJob

_NEWS_SECONDS = 5.0  # a wait without news would end at the job's time-out


def replace_stdin(job: ScriptJob) -> None:
    """Have all ranks read what rank 0 reads, and refuse debuggers, which need one process."""
    stdin = io.BufferedReader(_Shared(job), buffer_size=1 << 16)
    job.replace(sys, "stdin", io.TextIOWrapper(stdin, encoding="utf-8"))
    for owner, name in ((sys, "breakpointhook"), (pdb, "set_trace")):
        job.replace(owner, name, _refuse_debugger)


def _refuse_debugger(*_: Any, **__: Any) -> None:
    """Raise a UsageError, unless breakpoints are switched off as for Python itself."""
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        raise UsageError(
            "a debugger stops one rank, and the others would wait for it until the time-out",
            hint="collectiverun -np 1 --keras script.py; or PYTHONBREAKPOINT=0, which skips "
            "breakpoints",
        )


class _Shared(io.RawIOBase):
    """The bytes of rank 0's standard input, on every rank.

    Outside of the script's own main thread, as in a callback, rank 0 reads alone.
    """

    def __init__(self, job: ScriptJob):
        self._job, self._process = job, os.getpid()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there, at most as much as fits; 0 at the end."""
        read = self._read(len(buffer))
        buffer[: len(read)] = read
        return len(read)

    def _read(self, size: int) -> bytes:
        job = self._job
        alone = job.inside or os.getpid() != self._process
        if alone or threading.current_thread() is not threading.main_thread():
            return os.read(0, size)
        reading: _Reading | None = None

        def attempt() -> bytes | OSError:
            nonlocal reading
            with job.calling(INPUT):
                if job.backend.rank:
                    return _await_news(lambda: broadcast_object(job.backend, None))
                reading = reading or _Reading(
                    size
                )  # once, whichever ranks die meanwhile
                while not reading.done.wait(_NEWS_SECONDS):
                    broadcast_object(job.backend, None)
                found: bytes | OSError = broadcast_object(job.backend, reading.result)
                return found

        found = job.units.run(attempt, INPUT)
        if isinstance(found, OSError):
            raise found
        return found


class _Reading:
    """One read, by a thread: rank 0 can tell the others meanwhile that it still waits."""

    def __init__(self, size: int):
        self.result: bytes | OSError = b""
        self.done = threading.Event()
        threading.Thread(target=self._work, args=(size,), daemon=True).start()

    def _work(self, size: int) -> None:
        try:
            self.result = os.read(0, size)
        except OSError as error:
            self.result = error
        self.done.set()


def _await_news(receive: Callable[[], Any]) -> Any:
    """Return the first message that is not None."""
    while (found := receive()) is None:
        pass
    return found
