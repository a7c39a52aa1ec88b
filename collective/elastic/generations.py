"""The generations of a job whose hosts change, for the launcher and its ranks.

Ranks cannot join a running job on several hosts, because MPI cannot add processes. Such
a job restarts on the present hosts, as its next generation. All ranks are asked to end
after the present step, each host keeps the state, and the next generation continues
from it.

The next generation may overlap the present one. It starts while that one trains, up to
the point at which it needs the state (``wait_for_previous``), so no rank waits for the
start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from collective.elastic import membership_file
from collective.errors import CollectiveError
from collective.net import private_files

# A secret name, the same in all generations; and the number of this generation.
JOB_VARIABLE, NUMBER_VARIABLE = "COLLECTIVE_RESTARTABLE_JOB", "COLLECTIVE_GENERATION"
# Set in a generation that starts before the previous one has ended.
OVERLAPS = "COLLECTIVE_OVERLAPS"
VARIABLES = (JOB_VARIABLE, NUMBER_VARIABLE, OVERLAPS)
# The exit code of a rank that has ended for the next generation.
EXIT_CODE = 75
_POLL_SECONDS = 0.005


def may_restart() -> bool:
    """Return whether this job may have a next generation."""
    return JOB_VARIABLE in os.environ


def number() -> int:
    """Return the number of this generation, from 0."""
    return int(os.environ.get(NUMBER_VARIABLE, "0"))


def overlaps() -> bool:
    """Return whether the previous generation may still train."""
    return OVERLAPS in os.environ


def wait_for_previous(prepare: Callable[[], None] = lambda: None) -> None:
    """Wait until this generation may take the state and train.

    Each rank calls this when it has done all that it can do without the state. Until it
    returns, the previous generation writes its files.

    Args:
        prepare: Other work that a generation that overlaps can do while it waits.

    Raises:
        CollectiveError: If the launcher has ended.
    """
    if not may_restart():
        return
    if overlaps():
        prepare()
        membership_file.write_state(membership_file.READY)
        while (state := membership_file.read_state()) == membership_file.READY:
            time.sleep(_POLL_SECONDS)
        if not state:
            raise CollectiveError(
                "the launcher has ended", hint="start the job again", everywhere=False
            )
        del os.environ[OVERLAPS]
    membership_file.write_state(membership_file.TRAINS)


def report_handed_over() -> None:
    """Report that this rank has closed all its files: the next generation may begin."""
    membership_file.write_state(membership_file.HANDED_OVER)


def restart_requested() -> bool:
    """Return whether this rank is asked to end for the next generation."""
    return may_restart() and membership_file.read_state() == membership_file.RESTART


def state_folder(job: str | None = None) -> Path:
    """Return the folder in which this host keeps the state for the next generation."""
    job = job or os.environ[JOB_VARIABLE]
    return Path(tempfile.gettempdir(), f"collective-{job}-{socket.gethostname()}")


def make_state_folder() -> Path:
    """Make that folder, empty, for this user alone; raise OSError if that fails."""
    remove_state()
    folder = state_folder()
    folder.mkdir(mode=0o700)
    return folder


def kept_state() -> Path | None:
    """Return that folder if this user made it in the previous generation, else None."""
    if may_restart() and number():
        with contextlib.suppress(OSError, CollectiveError):
            folder = state_folder()
            private_files.check(folder)
            return folder
    return None


def remove_state(job: str | None = None) -> None:
    """Remove the state that this host has kept; of this job, once all ranks have it."""
    shutil.rmtree(state_folder(job), ignore_errors=True)


if __name__ == "__main__":  # the launcher runs this on hosts that have left the job
    if job := sys.stdin.readline().strip():
        remove_state(job)
