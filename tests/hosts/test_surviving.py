"""The survivors of a broken job on several hosts meet again.

tests/faults has trainings in which hosts or ranks are killed.
"""

from __future__ import annotations

import signal
import sys
import textwrap

import pytest

from tests import launch
from tests.collective.test_regroup import LOOP
from tests.hosts.lab import NETWORK


@pytest.mark.parametrize(
    ("slots", "deaths", "left"),
    [
        ([2, 2], "3:5", [0, 1, 2]),
        ([2, 2], "0:3 1:9", [2, 3]),  # the first host has failed
        ([2, 1, 1], "3:5 0:meeting 2:meeting", [1]),
    ],
    ids=["one", "a host", "all but one"],
)
def test_those_that_are_left_go_on(slots, deaths, left, hosts):
    program = [sys.executable, "-c", textwrap.dedent(LOOP)]
    command = hosts.mpirun(slots, program, "--with-ft", "ulfm", "-x", "DEATHS")
    env = launch.environment(DEATHS=deaths, COLLECTIVE_TIMEOUT="30")
    code, printed = launch.run(command, env, 60)
    assert code == 0, printed
    for number in range(len(left)):
        assert f"{left} {number} {len(left)} True" in printed, printed


def test_those_that_must_end_leave(hosts):
    """tests/faults has trainings whose ranks leave, too."""
    words = ["--with-ft", "ulfm", "-x", "COLLECTIVE_MIN_NP"]
    program = [sys.executable, "tests/hosts/ranks_elastic.py", "leave", "0", "3"]
    command = hosts.mpirun([2, 2], program, *words)
    env = launch.environment(forked=True, COLLECTIVE_MIN_NP="2")
    code, printed = launch.run(command, env, 60)
    assert code == 0, printed
    for rank in range(2):
        assert f"36.0 {[4, 4, 4, 2, 2, 2, 2, 2]} {rank}" in printed, printed


ENDS_BEFORE = """
import os, signal
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
import collective
collective.init()
"""


def test_one_that_never_came_ends_the_job(hosts):
    """MPI cannot start without that rank."""
    words = ["-H", f"{NETWORK}.1:1,{NETWORK}.2:1", "--min-np", "1"]
    command = hosts.ours("collective.launch", *words, sys.executable, "-c", ENDS_BEFORE)
    code, printed = launch.run(command, launch.environment(), 50)
    assert code == 128 + signal.SIGKILL, printed
    assert "rank 1 on lab2 ended by SIGKILL, before it had joined the job" in printed


def test_mpirun_that_ends_all_ranks_is_refused(hosts):
    program = [sys.executable, "train.py", "--backend", "native", "--min-np", "1"]
    code, printed = launch.run(hosts.mpirun([1, 1], program), launch.environment(), 60)
    assert code == 2 and "HINT: mpirun --with-ft ulfm" in printed, printed
