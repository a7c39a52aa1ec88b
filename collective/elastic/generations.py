"""The rounds of a job whose hosts change: what the launcher and its ranks share.

Ranks cannot come to a job on several hosts, for MPI cannot take them in. Such a job is
begun anew on the hosts there are then, its next round: all ranks are asked to end after
the step under way, each host keeps the state, and the next round goes on from it.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from collective.elastic import membership_file
from collective.errors import CollectiveError
from collective.net import private_files

# A name that nobody can guess, the same in all rounds; and the number of this one.
JOB, NUMBER = "COLLECTIVE_ROUNDS_OF", "COLLECTIVE_ROUND"
# Of a rank that has ended for the next round.
EXIT_CODE = 75


def there() -> bool:
    """Whether this job may have a next round."""
    return JOB in os.environ


def number() -> int:
    """Of this round, from 0."""
    return int(os.environ.get(NUMBER, "0"))


def asked() -> bool:
    """Whether this rank is asked to end for the next round."""
    return there() and membership_file.told() == membership_file.RESTART


def name_of(job: str) -> Path:
    """The folder in which this host keeps what the next round goes on from."""
    return Path(tempfile.gettempdir(), f"collective-{job}-{socket.gethostname()}")


def keep() -> Path:
    """Makes that folder anew, for this user alone.

    Raises:
        OSError: If it cannot be made.
    """
    drop()
    folder = name_of(os.environ[JOB])
    folder.mkdir(mode=0o700)
    return folder


def kept() -> Path | None:
    """That folder, where this user has made it in the round before."""
    if not there() or not number():
        return None
    folder = name_of(os.environ[JOB])
    try:
        private_files.check(folder)
    except (OSError, CollectiveError):
        return None
    return folder


def drop() -> None:
    """Removes it: all ranks have what is in it."""
    forget(os.environ[JOB])


def forget(job: str) -> None:
    """Removes what this host has kept of a job."""
    shutil.rmtree(name_of(job), ignore_errors=True)


if __name__ == "__main__":  # the launcher, on hosts that are not in the job any more
    forget(sys.stdin.readline().strip())
