"""What may go wrong with a job on several hosts: it ends, and says why.

Ours is a launcher that ends within ten seconds; how long it takes is not asserted, for
the machine may be busy, but told in docs/launching.md. A test that waits in vain gives
up after a minute.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests import launch
from tests.hosts.lab import NETWORK

SECONDS = 60
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
TWO = f"{NETWORK}.1:2,{NETWORK}.2:2"


@pytest.fixture(autouse=True)
def nothing_is_left(hosts) -> Iterator[None]:
    """No process lives on any host after a test."""
    yield
    left = _eventually_none(hosts.processes)
    hosts.end_all()
    assert left == [], left


def launcher(hosts, *words: str, agent: Path | None = None) -> list[str]:
    return hosts.ours("collective.launch", *words, agent=agent)


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
    agent = hosts.agent_with(2, tmp_path)
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
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        job = subprocess.Popen(
            command,
            cwd=launch.ROOT,
            env=launch.environment(
                COLLECTIVE_TIMEOUT=str(2 * SECONDS),
                OMPI_MCA_btl_sm_backing_directory=str(tmp_path),
            ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
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


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
