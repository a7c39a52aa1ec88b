"""Temporary folders of a script: they go when no rank can read them any more.

The ranks of a host share a ``tempfile.TemporaryDirectory()`` of the script, and each removes
it where its own object ends: at the end of a function, or of the process. Another rank may
still be before that line.
"""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Callable
from typing import Any

from collective.training.unedited.script_job import ScriptJob


def postpone_removals_of_folders(job: ScriptJob) -> None:
    """Have folders that end with their object stay until all ranks have passed that line.

    ``with`` and ``cleanup()`` are calls of the script, which ``removals`` replaces.
    """
    postponed = _Postponed(job)
    stock = tempfile.TemporaryDirectory._cleanup  # type: ignore[attr-defined]

    def cleanup(_: Any, name: str, *args: Any, **kwargs: Any) -> None:
        if job.undone or not any(n in os.path.basename(name) for n in job.shared_names):
            stock(name, *args, **kwargs)
        else:
            postponed.add(lambda: stock(name, *args, **kwargs))

    job.replace(tempfile.TemporaryDirectory, "_cleanup", classmethod(cleanup))
    job.at_meetings.append(postponed.meet)
    atexit.register(postponed.end)


class _Postponed:
    """Removals that wait for the other ranks."""

    def __init__(self, job: ScriptJob):
        self._job = job
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._meetings = 0
        self._ended = False

    def add(self, remove: Callable[[], None]) -> None:
        """Remove a folder later, or, at the end of the process, at once."""
        if not self._ended:
            self._waiting.append((self._meetings, remove))
        elif self._job.backend.local_rank == 0:
            remove()

    def meet(self) -> None:
        """Remove what waits since before the last meeting.

        Rank 0 begins a meeting without the others, which have come when it begins the next.
        """
        waiting, self._waiting = self._waiting, []
        for begun, remove in waiting:
            if begun < self._meetings:
                remove()
            else:
                self._waiting.append((begun, remove))
        self._meetings += 1

    def end(self) -> None:
        """Remove the rest, once on each host."""
        self._ended = True
        waiting, self._waiting = self._waiting, []
        for _, remove in waiting:
            self.add(remove)
