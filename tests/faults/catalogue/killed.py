"""Ranks and launchers that end, by whatever hand."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.faults.fault import FOREVER, Fault, training
from tests.faults.job import Job
from tests.faults.undisturbed import goes_on_alike, goes_on_from_checkpoint

KEPT = (
    *("--checkpoint-dir", "{folder}/runs", "--checkpoint-every", "3"),
    *("--ledger", "{folder}/ledger"),
)
RESUMED = "--resume gives the undisturbed losses, and the ledger is perfect"
# How each launcher puts it that a rank was killed: what it is, or which.
NAMED = {
    "collectiverun": "rank {} failed: it ended by SIGKILL",
    "mpirun": "rank {} with PID .* exited on\n? *signal 9",
    "horovodrun": "rank: {}|Process name: {}",
}


def killed(place: str, rank: int, backend: str = "native", launcher: str = "") -> Fault:
    fault = Fault(
        f"kill -9 of rank {rank} in {place}",
        training(*KEPT, backend=backend),
        f"the job ends, and names the rank; {RESUMED}",
        code=128 + signal.SIGKILL,
        seconds=5 if backend == "native" else 10,
        inside=f"kill {place} {rank} 7",
        holds=goes_on_from_checkpoint,
        backend=backend,
        launcher=launcher,
    )
    named = NAMED[fault.started_by].format(rank, rank)
    return fault.but(told=(named,))


# What Open MPI leaves in /dev/shm when mpirun itself is killed.
OPEN_MPIS = r"sm_segment\..*"
PLACES = ("input", "forward", "all-reduce", "update", "checkpoint")


def _launcher_gets(number: signal.Signals) -> Callable[[Job], None]:
    def strike(job: Job) -> None:
        job.struck(0)
        job.strikes(lambda: os.kill(job.launcher.pid, number))

    return strike


def _terminal_interrupts(job: Job) -> None:
    """As Ctrl-C does: the whole foreground group hears it."""
    job.struck(0)
    job.strikes(lambda: os.killpg(job.launcher.pid, signal.SIGINT))


def launcher(name: str, promise: str, code: int, **more: Any) -> Fault:
    return Fault(
        name,
        training(steps=FOREVER, backend=more.get("backend", "native")),
        promise,
        code,
        seconds=10,
        inside="tell forward 0 5",
        **more,
    )


# Sums for ever; or once, if there was a job before it that did.
AGAIN = """
import os
from pathlib import Path
import numpy as np
{}

folder = Path(os.environ["FAULT_FOLDER"])
again = (folder / "again").exists()
while True:
    assert total(np.ones(300_000)).sum() == 600_000
    (folder / f"at-work-{{rank}}").touch()
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
def total(array):
    out = np.empty_like(array)
    MPI.COMM_WORLD.Allreduce(array, out)
    return out
"""


def _all_at_once(job: Job) -> None:
    job.wait_for("at-work-1")
    job.strikes(job.end)


def _the_same_again(job: Job) -> None:
    """Runs to its end, beside whatever the dead one has left."""
    (job.folder / "again").touch()
    with job.another() as other:
        code, _ = other.wait()
    assert code == 0, other.text


def stale(backend: str, sums: str, **more: Any) -> Fault:
    return Fault(
        "kill -9 of every process at once, then the same job again",
        [
            sys.executable,
            "-c",
            AGAIN.format(sums).replace("{", "{{").replace("}", "}}"),
        ],
        "it runs, beside whatever the dead one has left",
        code=-signal.SIGKILL,
        seconds=5,
        strike=_all_at_once,
        holds=_the_same_again,
        backend=backend,
        **more,
    )


FAULTS = [
    *(killed(place, rank) for place in PLACES for rank in (0, 1)),
    *(killed("all-reduce", rank, "mpi") for rank in (0, 1)),
    *(killed("all-reduce", rank, "tf-multiworker") for rank in (0, 1)),
    killed("all-reduce", 1, "tf-multiworker", "collectiverun"),
    killed("all-reduce", 1, "horovod"),
    killed("update", 0).but(
        name="kill -9 of rank 0, then --resume on as many ranks",
        promise="the job ends; --resume gives the undisturbed losses bit for bit",
        holds=goes_on_alike,
    ),
    Fault(
        "kill -9 of two ranks of three at once",
        training(*KEPT),
        f"the job ends, and names one of them; {RESUMED}",
        code=128 + signal.SIGKILL,
        seconds=5,
        told=(r"rank [12] failed: it ended by SIGKILL",),
        inside="kill all-reduce 1,2 7",
        holds=goes_on_from_checkpoint,
        ranks=3,
    ),
    Fault(
        "a rank breaks down (SIGSEGV)",
        training(),
        "the job ends, and names the rank",
        code=128 + signal.SIGSEGV,
        seconds=5,
        told=("rank 1 failed: it ended by SIGSEGV",),
        inside="crash forward 1 5",
    ),
    Fault(
        "a rank leaves with exit code 0 in the middle",
        training(),
        "the job ends, and names the rank",
        code=1,
        seconds=5,
        told=(r"rank 1 \(process \d+\) died", "HINT"),
        inside="leave forward 1 5",
    ),
    Fault(
        "an error in one rank's own code",
        training(),
        "the job ends with that rank's traceback",
        code=1,
        seconds=5,
        told=("RuntimeError: made to fail", "rank 1"),
        inside="raise forward 1 5",
    ),
    Fault(
        "SIGTERM to one rank",
        training(*KEPT),
        f"the job ends, and names the rank; {RESUMED}",
        code=128 + signal.SIGTERM,
        seconds=5,
        told=("rank 1 failed: it ended by SIGTERM",),
        inside="terminate forward 1 7",
        holds=goes_on_from_checkpoint,
    ),
    launcher(
        "kill -9 of the launcher",
        "every rank ends",
        -signal.SIGKILL,
        strike=_launcher_gets(signal.SIGKILL),
    ),
    launcher(
        "kill -9 of the launcher",
        "every rank ends",
        -signal.SIGKILL,
        strike=_launcher_gets(signal.SIGKILL),
        backend="mpi",
        leaves=OPEN_MPIS,
    ),
    launcher(
        "SIGTERM to the launcher",
        "every rank ends",
        128 + signal.SIGTERM,
        strike=_launcher_gets(signal.SIGTERM),
    ),
    launcher(
        "SIGTERM to the launcher",
        "every rank ends",
        1,
        strike=_launcher_gets(signal.SIGTERM),
        backend="mpi",
    ),
    launcher(
        "Ctrl-C",
        "every rank ends",
        128 + signal.SIGINT,
        strike=_terminal_interrupts,
    ),
    launcher(
        "Ctrl-C",
        "every rank ends",
        1,
        strike=_terminal_interrupts,
        backend="mpi",
    ),
    stale("native", BY_CORE, variables={"COLLECTIVE_JOB": f"stale {os.getpid()}"}),
    stale("mpi", BY_MPI, leaves=OPEN_MPIS),
]
