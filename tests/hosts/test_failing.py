<<<<<<< Updated upstream
"""A rank that dies on one host ends the job on all, and is named."""

from __future__ import annotations

=======
"""What may go wrong with a job on several hosts: it ends, and says why.

Ours is a launcher that ends within ten seconds; how long it takes is not asserted, for
the machine may be busy, but told in docs/launching.md. A test that waits in vain gives
up after a minute.
"""

from __future__ import annotations

import contextlib
>>>>>>> Stashed changes
import os
import re
import signal
import subprocess
import sys
import time
<<<<<<< Updated upstream
=======
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
>>>>>>> Stashed changes

import psutil
import pytest

from tests import launch
<<<<<<< Updated upstream

=======
from tests.hosts.lab import NETWORK

SECONDS = 60
>>>>>>> Stashed changes
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
<<<<<<< Updated upstream


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
=======
TWO = f"{NETWORK}.1:2,{NETWORK}.2:2"


@pytest.fixture(autouse=True)
def nothing_is_left(hosts) -> Iterator[None]:
    """No process lives on any host after a test."""
    yield
    left = _eventually_none(hosts.processes)
    hosts.end_all()
    assert left == [], left


def launcher(hosts, *words: str, agent: Path | None = None) -> list[str]:
    start = [sys.executable, "-m", "collective.launch", "--network-interfaces", "eth0"]
    shell = ["--remote-shell", str(agent or hosts.agent)]
    return hosts.on(1, [*start, *shell, *words])


@pytest.mark.parametrize(
    "name, why",
    [
        (f"{NETWORK}.99", "route|reachable|timed out"),
        ("nowhere.invalid", "not known|name resolution"),
    ],
)
def test_a_host_that_cannot_be_reached(name, why, hosts):
    command = launcher(hosts, "-H", f"{NETWORK}.1:1,{name}:1", "true")
    code, printed = launch.run(command, launch.environment(), SECONDS)
    assert code == 1, printed
    told = rf"cannot reach every host:\n  {re.escape(name)}: .*({why})"
    assert re.search(told, printed), printed
    assert "HINT: this must work without a password" in printed


def test_a_host_that_cannot_call_back(hosts):
    """mpirun starts its daemon there, and would wait for it for ever."""
    with hosts.cut(2):
        command = launcher(hosts, "-H", TWO, "true")
        code, printed = launch.run(command, launch.environment(), SECONDS)
        hosts.end_all()  # what waits on the host that nobody reaches
    assert code == 124, printed
    assert "2 of 4 ranks did not start" in printed or "4 of 4" in printed
    assert f"{NETWORK}.2: no connection from it to {NETWORK}.1: " in printed
    assert "firewall" in printed.splitlines()[-1]


def test_unequal_versions(hosts, tmp_path):
    other = tmp_path / "keras-0.0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: keras\nVersion: 0.0.1"
    )
    agent = tmp_path / "agent"
    agent.write_text(
        f"#!/bin/bash\nold='PYTHONPATH={launch.ROOT}'\n"
        f"new='PYTHONPATH={tmp_path}:{launch.ROOT}'\n"
        f'exec {hosts.agent} "${{@//$old/$new}}"\n'
    )
    agent.chmod(0o755)
    command = launcher(hosts, "-H", TWO, "true", agent=agent)
    code, printed = launch.run(command, launch.environment(), SECONDS)
    assert code == 1, printed
    assert re.search(rf"keras: \S+ on this host; 0.0.1 on {NETWORK}.2\n", printed), (
        printed
    )
    assert "HINT: install the same on every host" in printed


@dataclass
class Running:
    """A job at work: its processes by rank, and what it has printed."""

    job: subprocess.Popen
    printed: Path
    ranks: dict[int, int]

    @property
    def text(self) -> str:
        return self.printed.read_text()


@contextlib.contextmanager
def running(command: list[str], tmp_path: Path) -> Iterator[Running]:
    """Starts four ranks, and has them sum for a moment."""
>>>>>>> Stashed changes
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        job = subprocess.Popen(
            command,
            cwd=launch.ROOT,
            env=launch.environment(
<<<<<<< Updated upstream
                COLLECTIVE_TIMEOUT="60",
=======
                COLLECTIVE_TIMEOUT=str(2 * SECONDS),
>>>>>>> Stashed changes
                OMPI_MCA_btl_sm_backing_directory=str(tmp_path),
            ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
<<<<<<< Updated upstream
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
=======
        deadline = time.monotonic() + SECONDS
        while True:
            found = re.findall(r"<rank (\d) is process (\d+)>", printed.read_text())
            if len(found) == 4:
                break
            assert time.monotonic() < deadline, printed.read_text()
            assert job.poll() is None, printed.read_text()
            time.sleep(0.1)
        time.sleep(0.5)
        yield Running(job, printed, {int(rank): int(pid) for rank, pid in found})
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait(10)


def test_the_launcher_names_a_killed_rank(hosts, tmp_path):
    """Whoever was connected to it ends, too, and may be heard of first."""
    command = launcher(hosts, "-H", TWO, sys.executable, "-c", LOOP)
    with running(command, tmp_path) as its:
        os.kill(its.ranks[3], signal.SIGKILL)
        assert its.job.wait(SECONDS) == 128 + signal.SIGKILL, its.text
    last = its.text.rstrip().splitlines()[-1]
    assert last.endswith("rank 3 of 4 on lab2 failed: it ended by SIGKILL"), its.text


def test_the_launcher_names_a_host_that_vanished(hosts, tmp_path):
    """Nothing says that it has gone: it just falls silent."""
    command = launcher(hosts, "-H", TWO, sys.executable, "-c", LOOP)
    with running(command, tmp_path) as its, hosts.cut(2):
        assert its.job.wait(SECONDS) == 1, its.text
        # On the host itself Open MPI ends the ranks by the same rule, if it had
        # nothing under way to us; else the kernel tries to send that for long.
        hosts.end_all()
    lost = "the connection to lab2 was lost; what became of rank 2, 3 of 4 is not known"
    assert lost in its.text
    assert its.text.rstrip().splitlines()[-1].startswith("HINT: ")


@pytest.mark.parametrize("more", [[], ["--with-ft", "ulfm"]], ids=["plain", "ulfm"])
def test_mpirun_alone_leaves_no_rank(more, hosts, tmp_path):
    """By mpirun; and where mpirun lets the others live, by themselves."""
    command = hosts.mpirun([2, 2], [sys.executable, "-c", LOOP], *more)
    with running(command, tmp_path) as its:
        os.kill(its.ranks[3], signal.SIGKILL)
        left = _eventually_none(lambda: [p for p in its.ranks.values() if _lives(p)])
        assert left == [], its.text
        # In 2 of 30 jobs the mpirun of Open MPI 5.0.11 itself stayed behind: a daemon
        # of its own had not heard that they were gone. Our launcher then ends it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert its.job.wait(5), its.text
        hosts.end_all()
    if more:  # MPI says it, or the rank of the same host, which tells the others
        died = rf"rank 3 \(process {its.ranks[3]}\) died|connection to rank 3:"
        # Not all come to speak: mpirun ends the rest when the first has ended.
        told = re.findall(r"<rank \d lost: (.*)", its.text)
        assert told and all(re.search(died, one) for one in told), its.text
>>>>>>> Stashed changes


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


<<<<<<< Updated upstream
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
=======
def _eventually_none(look) -> list[str]:
    """The command lines of processes that are there for longer than a while."""
    deadline = time.monotonic() + SECONDS / 2
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    lines = []
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(" ".join(psutil.Process(process).cmdline()))
    return lines
>>>>>>> Stashed changes
