"""Kills that a job survives in place: ``collectiverun --min-np``."""

from __future__ import annotations

import functools
import subprocess
import sys

from tests.faults.catalogue.killed import KEPT, PLACES, RESUMED
from tests.faults.fault import JSON, Fault, training
from tests.faults.job import Job
from tests.faults.undisturbed import (
    as_undisturbed,
    assert_perfect_ledger,
    goes_on_from_checkpoint,
)


@functools.cache
def why_not() -> str:
    """Return why a job cannot survive here yet; empty if it can."""
    command = [sys.executable, "-m", "collective.launch", "--help"]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    return "" if "--min-np" in text else "this launcher has no --min-np"


def undisturbed(job: Job) -> None:
    as_undisturbed(job)
    assert_perfect_ledger(job.folder / "ledger")


def survived(place: str, victims: str, ranks: int = 3) -> Fault:
    who = f"rank {victims}" if len(victims) == 1 else f"ranks {victims} at once"
    return Fault(
        f"kill -9 of {who} in {place}, --min-np 2",
        training(*KEPT, *JSON),
        "the others redo the step and continue; the losses are the undisturbed ones, "
        "and the ledger is perfect",
        code=0,
        seconds=None,
        inside=f"kill {place} {victims} 7",
        holds=undisturbed,
        ranks=ranks,
        launcher_options=("--min-np", "2"),
        needs=why_not,
    )


# Launchers under which the rank is known before anything else.
BEFORE_INIT = '[ "$COLLECTIVE_RANK" != 0 ] || kill -9 $$; exec "$@"'

FAULTS = [
    *(survived(place, rank) for place in PLACES for rank in "01"),
    survived("all-reduce", "0,2", ranks=4),
    Fault(
        "kill -9 of rank 0 before it has met the others, --min-np 2",
        ["sh", "-c", BEFORE_INIT, "sh", *training(*JSON)],
        "the others begin without it; the losses are the undisturbed ones",
        code=0,
        seconds=None,
        holds=as_undisturbed,
        ranks=3,
        launcher_options=("--min-np", "2"),
        needs=why_not,
    ),
    Fault(
        "kill -9 of two ranks of three at once, --min-np 2",
        training(*KEPT),
        f"fewer are left than may be: the job ends; {RESUMED}",
        code=1,
        seconds=10,
        inside="kill all-reduce 1,2 7",
        holds=goes_on_from_checkpoint,
        ranks=3,
        launcher_options=("--min-np", "2"),
        needs=why_not,
    ),
]
