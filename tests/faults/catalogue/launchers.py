"""Launchers that end, and whole jobs at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.faults.fault import FOREVER, OPEN_MPIS, Fault, training
from tests.faults.job import Job


def _gets(number: signal.Signals) -> Callable[[Job], None]:
    def strike(job: Job) -> None:
        job.struck(0)
        job.strikes(lambda: os.kill(job.launcher.pid, number))

    return strike


def _interrupts(job: Job) -> None:
    """Interrupt the whole foreground group, as a terminal does."""
    job.struck(0)
    job.strikes(lambda: os.killpg(job.launcher.pid, signal.SIGINT))


def ended(name: str, strike: Callable[[Job], None], backend: str, code: int) -> Fault:
    return Fault(
        name,
        training(steps=FOREVER, backend=backend),
        "every rank ends",
        code=code,
        seconds=10,
        inside="report forward 0 5",
        strike=strike,
        backend=backend,
        leaves=OPEN_MPIS if backend == "mpi" and code < 0 else "",
    )


# Sums for ever; or once, if an earlier job has summed for ever.
SUMS = """
import os
from pathlib import Path
import numpy as np
{}
folder = Path(os.environ["FAULT_FOLDER"])
again = (folder / "again").exists()
while True:
    assert total(np.ones(300_000)).sum() == 600_000
    (folder / ("at-work-%s" % rank)).touch()
    if again:
        break
"""
BY_CORE = """
import collective
collective.init()
rank = collective.rank()
total = lambda array: collective.allreduce(array, collective.Sum)
"""
BY_MPI = """
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
total = lambda array: MPI.COMM_WORLD.allreduce(array)
"""


def _all_at_once(job: Job) -> None:
    job.wait_for("at-work-1")
    job.strikes(job.end)


def _the_same_again(job: Job) -> None:
    (job.folder / "again").touch()
    with job.another() as other:
        code, _ = other.wait()
    assert code == 0, other.text


def again(backend: str, how: str, **more: Any) -> Fault:
    return Fault(
        "kill -9 of every process at once, then the same job again",
        [sys.executable, "-c", SUMS.format(how)],
        "it runs, beside whatever the dead one has left",
        code=-signal.SIGKILL,
        seconds=5,
        strike=_all_at_once,
        holds=_the_same_again,
        backend=backend,
        **more,
    )


KILL, TERM, INT = -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT
FAULTS = [
    ended("kill -9 of the launcher", _gets(signal.SIGKILL), "native", KILL),
    ended("kill -9 of the launcher", _gets(signal.SIGKILL), "mpi", KILL),
    ended("SIGTERM to the launcher", _gets(signal.SIGTERM), "native", TERM),
    ended("SIGTERM to the launcher", _gets(signal.SIGTERM), "mpi", 1),
    ended("Ctrl-C", _interrupts, "native", INT),
    ended("Ctrl-C", _interrupts, "mpi", 1),
    again("native", BY_CORE, variables={"COLLECTIVE_JOB": f"stale {os.getpid()}"}),
    again("mpi", BY_MPI, leaves=OPEN_MPIS),
]
