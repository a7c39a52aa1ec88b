"""``COLLECTIVE_TIMEOUT`` for waits outside of the core."""

from __future__ import annotations

import os
import re
import subprocess
import sys

# Ends with 7 at the deadline, with 0 if nothing ends the process.
PROGRAM = """
import os, time
from collective import deadline

deadline.watch(3, lambda code: os._exit(6 + code))
{}
"""
WAITS = "with deadline.waiting('in MPI_Barrier'): time.sleep(200)"


def ends(program: str, seconds: str = "0.5") -> tuple[int, str]:
    """Return the exit code of such a program, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(program)],
        env={**os.environ, "COLLECTIVE_TIMEOUT": seconds},
        capture_output=True,
        text=True,
        timeout=150,
    )
    return done.returncode, done.stderr


def test_a_wait_that_takes_too_long_ends_the_job():
    code, printed = ends(WAITS)
    assert code == 7
    assert re.search(r"rank 3 waited \d+ s for other ranks in MPI_Barrier", printed)
    assert "HINT" in printed and "COLLECTIVE_TIMEOUT=seconds" in printed


ALLOWED = """
with deadline.waiting("in a step"):
    pass
with deadline.waiting("in a step", 60):  # it may take more
    child = os.fork()  # which does not wait for other ranks
    time.sleep(3)
    assert child == 0 or os.waitpid(child, 0)[1] == 0
"""


def test_nothing_else_ends_it():
    assert ends(ALLOWED, "2") == (0, "")


def test_a_time_that_is_not_one_is_refused():
    code, printed = ends("", "soon")
    assert code == 1 and "COLLECTIVE_TIMEOUT=soon" in printed
