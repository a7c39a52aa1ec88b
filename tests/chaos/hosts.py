"""Faults of a job on two hosts: hosts end or stand still, or the network is bad."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from tests.chaos.kinds import Chaos
from tests.faults.job import PATIENCE, Job
from tests.hosts import lab, switch
from tests.hosts.lab import NETWORK, Lab

HEARTBEAT, START_TIMEOUT, TIMEOUT = 5, 60, 30
# mpirun passes on those of the test's own variables that it gets by name.
PASSED = ("FAULT", "FAULT_FOLDER", "FAULT_PACE", "FAULT_SECONDS", "TMPDIR")


def why_not() -> str:
    """Return why there are no hosts here; empty if there are."""
    return switch.why_not() or lab.why_not()


def made() -> contextlib.AbstractContextManager[Lab]:
    """Make two hosts that a bad network joins."""
    return lab.hosts(2, bad=True)


def command(hosts: Lab, words: list[str]) -> list[str]:
    """Return the command for two ranks on the first host, and one on the other."""
    passed = " ".join(f"-x {name}" for name in PASSED)
    return hosts.ours(
        "collective.launch",
        "-H",
        f"{NETWORK}.1:2,{NETWORK}.2:1",
        "--heartbeat",
        str(HEARTBEAT),
        "--start-timeout",
        str(START_TIMEOUT),
        f"--mpi-args={passed}",
        *words,
    )


def _signals(*numbers: signal.Signals, pause: float) -> Callable[[Job, int], None]:
    """Send signals to all processes of the second host, one after another."""

    def strike(job: Job, rank: int) -> None:
        assert job.hosts is not None
        processes = job.hosts.processes_of(2)
        for number in numbers:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            time.sleep(pause)
        _until_end(job)

    return strike


def _network(
    seconds: float = PATIENCE, **changed: object
) -> Callable[[Job, int], None]:
    """Make the network bad for so long, or until the job ends."""

    def strike(job: Job, rank: int) -> None:
        assert job.hosts is not None and job.hosts.switch is not None
        with job.hosts.switch.at(**changed), contextlib.suppress(Exception):
            job.launcher.wait(seconds)
        _until_end(job)

    return strike


def _until_end(job: Job) -> None:
    """End the processes of the unreachable host, which the launcher cannot end."""
    with contextlib.suppress(Exception):
        job.launcher.wait(PATIENCE)
        assert job.hosts is not None
        job.hosts.end_all()


def _on(
    strike: Callable[[Job, int], None],
    survives: tuple[bool | None, bool | None],
    elastic: bool = False,
) -> Chaos:
    variables = {"COLLECTIVE_TIMEOUT": str(TIMEOUT)}
    return Chaos(strike, survives, variables=variables, elastic=elastic, on_hosts=True)


SECOND = frozenset({2})
CATALOGUE = {
    "host-ends": _on(_signals(signal.SIGKILL, pause=0), (False, None)),
    "host-stands-still": _on(_signals(signal.SIGSTOP, pause=0), (False, None), True),
    "host-pauses": _on(_signals(signal.SIGSTOP, signal.SIGCONT, pause=2), (True, True)),
    "link-cut": _on(_network(silent=SECOND, deaf=SECOND), (False, None)),
    "link-cut-one-way": _on(_network(silent=SECOND), (False, None)),
    "link-cut-other-way": _on(_network(deaf=SECOND), (False, None)),
    "link-cut-for-2-s": _on(_network(2, silent=SECOND, deaf=SECOND), (True, True)),
    "link-loses-5-%": _on(_network(loss=0.05), (True, True)),
    "link-takes-50-ms": _on(_network(delay=0.05), (True, True)),
    "link-drops-long-frames": _on(_network(longest=1000), (None, None)),
}
