"""What follows from how many ranks are left, after some have died or left."""

from __future__ import annotations

import sys

from collective.backends.base import Backend
from collective.errors import CollectiveError, ProcessExit
from collective.training.process.failure import ends_the_job


def check(backend: Backend, step: int, before: int, size: int, is_kept: bool) -> None:
    """End the job if too few ranks are left.

    Args:
        step: The number of the next step.
        before: How many ranks there were.
        size: How many are left.
        is_kept: Whether the job can be resumed from a folder.

    Raises:
        CollectiveError: There are fewer than ``--min-np``.
        ProcessExit: The same, on a rank that is left alone.
    """
    least = backend.options.min_np or 1
    if size >= least:
        return
    how = "the same command again continues from the folder of --resume"
    if not is_kept:
        how = "--resume FOLDER continues where a job has ended"
    error = CollectiveError(
        f"step {step}: of {before} ranks {size} {'is' if size == 1 else 'are'} left, and "
        f"--min-np is {least}",
        hint=f"a smaller --min-np; {how}",
        everywhere=False,
    )
    if backend.size == 1:
        print(f"rank 0: error: {error}", file=sys.stderr, flush=True)
        raise ProcessExit(error.exit_code)
    with ends_the_job(backend):
        if backend.rank:
            backend.barrier()  # until rank 0 ends the job
        raise error


def print_repeated(before: int, size: int, what: str) -> None:
    """Print that the ranks that are left repeat something.

    Args:
        before: How many ranks there were.
        size: How many are left.
        what: What they repeat.
    """
    are, repeat = ("is", "repeats") if size == 1 else ("are", "repeat")
    print(
        f"collective: of {before} ranks {size} {are} left, and {repeat} {what}",
        file=sys.stderr,
        flush=True,
    )
