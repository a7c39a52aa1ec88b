"""Our launcher on several hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests import launch
from tests.hosts.lab import NETWORK

TWO = ["-H", f"{NETWORK}.1:2,{NETWORK}.2:1"]
SUMS = (
    "import collective as c, numpy as np; c.init(); "
    "total = c.allreduce(np.array([10.0 ** c.rank()]), c.Sum)[0]; "
    "print('sum', total, c.local_size(), c.cross_rank(), c.cross_size(), flush=True)"
)
FAILS = """
import sys, time
from collective.environment import detect
if detect().rank == 2:
    raise RuntimeError("on the second host")
time.sleep(1000)
"""
# Variables of srun --mpi=pmix: without mpirun's own, but with its PMIx server.
BY_SRUN = """
export SLURM_PROCID=$OMPI_COMM_WORLD_RANK SLURM_LOCALID=$OMPI_COMM_WORLD_LOCAL_RANK
export SLURM_NTASKS=3 SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE=2,1
export SLURM_NODEID=$((SLURM_PROCID / 2))
unset ${!OMPI_COMM_WORLD_*}
exec "$@"
"""
SLEEPS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("here", flush=True)
time.sleep(1000)
"""


def launcher(hosts, *words: str) -> list[str]:
    return hosts.ours("collective.launch", *TWO, *words)


def run(command: list[str]) -> tuple[int | None, str]:
    return launch.run(command, launch.environment(), 90)


def test_ranks_on_two_hosts_sum(hosts):
    command = launcher(hosts, sys.executable, "-c", SUMS)
    code, printed = run(command)
    assert code == 0, printed
    for rank, place in enumerate(("2 0 2", "2 0 1", "1 1 2")):
        assert f"[{rank}] sum 111.0 {place}" in printed
    # The line of mpirun, as a user can type it.
    line = next(line for line in printed.splitlines() if "mpirun -np 3" in line)
    code, printed = run(hosts.on(1, ["bash", "-c", line.partition(": ")[2]]))
    assert code == 0 and printed.count("sum 111.0") == 3, printed


def test_hosts_of_one_name_are_distinguished_or_refused(hosts):
    sums = launcher(hosts, sys.executable, "-c", SUMS)
    with hosts.names("rack-$host.example.com"):  # MPI would see "rack-1" and "rack-2"
        assert run(sums)[0] == 0
    with hosts.names("my-node.rack-$host"):
        code, printed = run(sums)
        assert code == 0 and printed.count("sum 111.0") == 3, printed
    with hosts.names("node"):
        code, printed = run(sums)
        assert code == 1 and "both call themselves node" in printed, printed
        # Without our launcher only MPI could notice, and its ranks wait for each other.
        rank = ["env", "COLLECTIVE_START_TIMEOUT=5", sys.executable, "-c", SUMS]
        code, printed = run(hosts.mpirun([1, 1], rank))
    # On a busy machine Open MPI may give up first, with an exit code of its own.
    found = "on a host of the name node: MPI did not connect" in printed
    assert code == 14 or (code == 1 and found), printed


def test_srun_with_pmix_joins_the_hosts(hosts):
    program = f"""
from collective.backends.registry import BACKENDS
from collective.environment import detect
print(detect().launcher, BACKENDS["native"].availability(detect()))
{SUMS}
"""
    rank = ["bash", "-c", BY_SRUN, "srun", sys.executable, "-c", program]
    code, printed = run(hosts.mpirun([2, 1], rank))
    assert code == 0, printed
    joined = "srun Availability(usable=True"
    assert printed.count(joined) == printed.count("sum 111.0") == 3, printed


def test_the_rank_that_fails_has_the_last_word(hosts):
    command = launcher(hosts, sys.executable, "-c", FAILS)
    code, printed = run(command)
    *_, before, last = printed.splitlines()
    assert code == 1
    assert before == "RuntimeError: on the second host"
    assert last.endswith("rank 2 of 3 on lab2 failed: it ended with exit code 1")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_launcher(number, hosts):
    command = launcher(hosts, sys.executable, "-c", SLEEPS)
    job = subprocess.Popen(
        command,
        cwd=launch.ROOT,
        env=launch.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert job.stdout is not None
    try:
        for _ in range(3):
            assert b"here" in job.stdout.readline()
        (started,) = [p for p in hosts.processes() if is_launcher(p)]
        os.kill(started, number)
        job.wait(launch.PATIENCE_SECONDS)
        launch.await_that(lambda: not hosts.processes())
    finally:
        hosts.end_all()
        job.stdout.close()
        job.wait(launch.PATIENCE_SECONDS)


def is_launcher(process: int) -> bool:
    """Return whether a process is the launcher on the first host."""
    try:
        words = psutil.Process(process).cmdline()
        parent = psutil.Process(process).parent()
    except psutil.NoSuchProcess:
        return False
    is_one = words[1:3] == ["-m", "collective.launch"]
    # Its watchdog is a fork of it, with the same words.
    return is_one and (parent is None or parent.cmdline() != words)
