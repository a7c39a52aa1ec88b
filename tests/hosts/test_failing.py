"""A rank that dies on one host ends the job on all, and is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests import launch

LOOP = """
import os, sys
import numpy as np
import collective

collective.init()
rank, size = collective.rank(), collective.size()
arrays = [np.full(n, float(rank), np.float32) for n in (1, 300_000, 3_000_000)]
print(f"<rank {rank} is process {os.getpid()}>", flush=True)
try:
    while True:
        for array in arrays:
            result = collective.allreduce(array, collective.Sum)
            assert (result == size * (size - 1) / 2).all()
except collective.PeerLost as error:
    print(f"<rank {rank} lost: {error}>", flush=True)
    sys.exit(5)
"""


# Of 30 jobs that Open MPI 5.0.11 was left to end, mpirun itself outlived all their
# ranks twice: a daemon of its own had not heard that they were gone.
ATTEMPTS = 5


@pytest.mark.parametrize("more", [[], ["--with-ft", "ulfm"]], ids=["plain", "ulfm"])
def test_a_killed_rank_ends_the_job(more, hosts, tmp_path):
    """By mpirun; and where mpirun lets the others live, by themselves."""
    for _ in range(ATTEMPTS):
        code, processes, text = _killed(hosts, more, tmp_path)
        if code is not None:
            break
    assert code, text
    if more:  # MPI says it, or the rank of the same host, which tells the others
        died = rf"rank 3 \(process {processes[3]}\) died|connection to rank 3:"
        # Not all come to speak: mpirun ends the rest when the first has ended.
        told = re.findall(r"<rank \d lost: (.*)", text)
        assert told and all(re.search(died, one) for one in told), text
    else:  # the host at least: MPI of another one may abort before mpirun looks
        told = r"rank 3.*(signal 9|Killed)|Peer host: +lab2"
        assert re.search(told, text, re.DOTALL), text


def _killed(hosts, more, tmp_path) -> tuple[int | None, dict[int, int], str]:
    """Kills rank 3 of 4: mpirun's exit code (None if it stays), ranks, output."""
    command = hosts.mpirun([2, 2], [sys.executable, "-c", LOOP], *more)
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        job = subprocess.Popen(
            command,
            cwd=launch.ROOT,
            env=launch.environment(
                COLLECTIVE_TIMEOUT="60",
                OMPI_MCA_btl_sm_backing_directory=str(tmp_path),
            ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        processes = _started(job, printed)
        os.kill(processes[3], signal.SIGKILL)
        try:
            code = job.wait(30)  # it takes a second; the machine may be busy
        except subprocess.TimeoutExpired:
            code = None
            left = [r for r, process in processes.items() if _lives(process)]
            assert not left, (left, printed.read_text())
    finally:
        hosts.end_all()
        job.wait(10)
    return code, processes, printed.read_text()


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _started(job: subprocess.Popen, printed) -> dict[int, int]:
    """Process numbers by rank, once all ranks are at work."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and job.poll() is None:
        found = re.findall(r"<rank (\d) is process (\d+)>", printed.read_text())
        if len(found) == 4:
            time.sleep(0.5)
            return {int(rank): int(process) for rank, process in found}
        time.sleep(0.1)
    raise AssertionError(printed.read_text())


def test_nothing_is_left(hosts):
    """Runs last of this file: no process of the jobs above lives on the hosts."""
    assert [psutil.Process(p).cmdline() for p in hosts.processes()] == []
