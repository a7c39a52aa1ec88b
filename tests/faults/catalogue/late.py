"""Ranks that come late, or not, or by another clock."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

from tests.faults.fault import JSON, Fault, training
from tests.faults.job import Job
from tests.faults.undisturbed import as_undisturbed

CONTINUES = "the job continues; the losses are the undisturbed ones"
WAITED = (r"no progress for \d+ s", "rank 1 is not in a collective", "HINT")


def _continues(job: Job) -> None:
    process = job.struck(1)
    time.sleep(3)
    os.kill(process, signal.SIGCONT)


def for_ever(name: str, inside: str, backend: str, *messages: str) -> Fault:
    """Return a fault of rank 1. The first step, with its tracing, must be in time."""
    seconds = 30
    return Fault(
        f"{name}, for ever, COLLECTIVE_TIMEOUT={seconds}",
        training(backend=backend),
        "the job ends, and says who waits in what",
        code=1,
        seconds=seconds + 30,
        messages=(*messages, "HINT"),
        inside=inside,
        backend=backend,
        variables={"COLLECTIVE_TIMEOUT": str(seconds), "FAULT_SECONDS": "100000"},
    )


def late(name: str, inside: str, **more) -> Fault:
    backend = more.pop("backend", "native")
    return Fault(
        name,
        training(*JSON, backend=backend),
        CONTINUES,
        code=0,
        seconds=None,
        inside=inside,
        holds=as_undisturbed,
        backend=backend,
        **more,
    )


def jumps(seconds: int, backend: str) -> Fault:
    """Return a fault of all ranks, which have the clock of one machine."""
    way = "forward" if seconds > 0 else "back"
    fault = late(
        f"the clock jumps {way} by an hour", "jump forward 1 5", backend=backend
    )
    return fault.but(
        program=[sys.executable, "-m", "tests.faults.clock", *fault.program],
        variables={"FAULT_SECONDS": str(seconds)},
        needs=lambda: "" if shutil.which("cc") else "there is no C compiler",
    )


FAULTS = [
    late("SIGSTOP to a rank, SIGCONT 3 s later", "stop forward 1 5", strike=_continues),
    late(
        "SIGSTOP to a rank, SIGCONT 3 s later",
        "stop forward 1 5",
        strike=_continues,
        backend="mpi",
    ),
    late(
        "SIGSTOP to a rank, SIGCONT 3 s later",
        "stop forward 1 5",
        strike=_continues,
        backend="tf-multiworker",
    ),
    late(
        "a rank is 3 s late, COLLECTIVE_STALL_SECONDS=1",
        "sleep forward 1 5",
        messages=WAITED,
        variables={"COLLECTIVE_STALL_SECONDS": "1"},
    ).but(promise=f"a warning says who waits for whom; {CONTINUES}"),
    Fault(  # the first step must be in time here, too
        "SIGSTOP to a rank, for ever, COLLECTIVE_TIMEOUT=20",
        training(),
        "the job ends, and names the rank",
        code=1,
        seconds=20 + 5,
        messages=(r"waited \d+ s for rank 1 in all-reduce", "HINT"),
        inside="stop forward 1 5",
        variables={"COLLECTIVE_TIMEOUT": "20"},
    ),
    for_ever(
        "SIGSTOP to a rank",
        "stop forward 1 5",
        "mpi",
        r"rank 0 waited \d+ s for other ranks in MPI_Allreduce of",
        "rank 1 is stopped",
    ),
    # TensorFlow itself notices a stopped rank.
    *(
        for_ever(
            "a rank waits for its data",
            "sleep input 1 5",
            backend,
            # Of the broadcast before the step, rank 0 may have no end yet.
            r"rank 0 waited \d+ s for other ranks in a (step|broadcast)",
            "rank 1 is in no collective; .* in input of step",
        )
        for backend in ("tf-multiworker", "horovod")
    ),
    *(
        jumps(seconds, backend)
        for seconds in (3600, -3600)
        for backend in ("native", "tf-multiworker")
    ),
]
