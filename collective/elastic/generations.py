"""The generations of a job whose hosts change: what the launcher and its ranks share.

Ranks cannot join a running job on several hosts, for MPI cannot add processes. Such a job
restarts on the present hosts, as its next generation: all ranks are asked to end after the
step under way, each host keeps the state, and the next generation continues from it.

It may overlap the present one: it is prepared while that one trains, up to the point
where it needs the state (``wait_for_previous``): no rank waits for it to start.
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

# A name that cannot be guessed, the same in all generations; and the number of this one.
JOB_VARIABLE, NUMBER_VARIABLE = "COLLECTIVE_RESTARTABLE_JOB", "COLLECTIVE_GENERATION"
# Set in a generation that starts before the one before has ended.
OVERLAPS = "COLLECTIVE_OVERLAPS"
VARIABLES = (JOB_VARIABLE, NUMBER_VARIABLE, OVERLAPS)
# Of a rank that has ended for the next generation.
EXIT_CODE = 75
_POLL_SECONDS = 0.005


def may_restart() -> bool:
    """Whether this job may have a next generation."""
    return JOB_VARIABLE in os.environ


def number() -> int:
    """Number of this generation, from 0."""
    return int(os.environ.get(NUMBER_VARIABLE, "0"))


def overlaps() -> bool:
    """Whether the generation before may still train."""
    return OVERLAPS in os.environ


def wait_for_previous(prepare: Callable[[], None] = lambda: None) -> None:
    """Returns when this generation may take the state and train.

    To be called by each rank, when it has done what it can without the state. Until then
    the generation before writes its files.

    Args:
        prepare: What else can be done meanwhile, by a generation that overlaps.

    Raises:
        CollectiveError: If the launcher has ended.
    """
    if not may_restart():
        return
    if overlaps():
        prepare()
        membership_file.write(membership_file.READY)
        while (state := membership_file.read()) == membership_file.READY:
            time.sleep(_POLL_SECONDS)
        if not state:
            raise CollectiveError(
                "the launcher has ended", hint="start the job again", everywhere=False
            )
        del os.environ[OVERLAPS]
    membership_file.write(membership_file.TRAINS)


def report_handed_over() -> None:
    """This rank has closed all files of the training: the next generation may begin."""
    membership_file.write(membership_file.HANDED_OVER)


def restart_requested() -> bool:
    """Whether this rank is asked to end for the next generation."""
    return may_restart() and membership_file.read() == membership_file.RESTART


def state_folder(job: str | None = None) -> Path:
    """The folder in which this host keeps the state for the next generation of a job."""
    job = job or os.environ[JOB_VARIABLE]
    return Path(tempfile.gettempdir(), f"collective-{job}-{socket.gethostname()}")


def make_state_folder() -> Path:
    """Makes that folder, empty, for this user alone; OSError if it cannot be made."""
    remove_state()
    folder = state_folder()
    folder.mkdir(mode=0o700)
    return folder


def kept_state() -> Path | None:
    """Returns that folder if this user has made it in the generation before."""
    if may_restart() and number():
        with contextlib.suppress(OSError, CollectiveError):
            folder = state_folder()
            private_files.check(folder)
            return folder
    return None


def remove_state(job: str | None = None) -> None:
    """Removes what this host has kept of a job; of this one, when all ranks have it."""
    shutil.rmtree(state_folder(job), ignore_errors=True)


if __name__ == "__main__":  # the launcher, on hosts that have left the job
    if job := sys.stdin.readline().strip():
        remove_state(job)
