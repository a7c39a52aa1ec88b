"""Ranks that leave on request, and others that join: nobody is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from tests.faults.catalogue.killed import KEPT, RESUMED
from tests.faults.fault import JSON, Fault, training
from tests.faults.job import Job
from tests.faults.undisturbed import (
    as_undisturbed,
    assert_perfect_ledger,
    goes_on_from_checkpoint,
)

ALIKE = (
    "no step is made again, the losses are the undisturbed ones, the ledger is perfect"
)


def no_step_again(replicas: list[int]) -> Any:
    def holds(job: Job) -> None:
        as_undisturbed(job)
        found = assert_perfect_ledger(job.folder / "ledger")
        # A new rank 0 writes the last step once more.
        assert sum(run.undone for run in found.runs) <= 1
        assert found.runs[-1].replicas == replicas[-1]
        assert [
            r for r in replicas if r not in {run.replicas for run in found.runs}
        ] == []

    return holds


def left(rank: int, backend: str = "native") -> Fault:
    words = ["--min-np", "2"]
    by_mpi = backend == "mpi"
    return Fault(
        f"SIGTERM to rank {rank}, --min-np 2",
        training(*KEPT, *JSON, *words * by_mpi, backend=backend),
        f"it leaves after the step under way, and the others continue; {ALIKE}",
        code=0,
        seconds=None,
        messages=(f"rank {rank} of 3 left; 2 ranks continue from step [89] ",),
        inside=f"terminate forward {rank} 7",
        holds=no_step_again([3, 2]),
        ranks=3,
        backend=backend,
        launcher_options=("--with-ft", "ulfm") if by_mpi else words,
    )


def _slots(folder: Path, number: int) -> None:
    part = folder / "slots.part"
    part.write_text(f"localhost:{number}\n")
    part.rename(folder / "slots")


def _a_slot_more(job: Job) -> None:
    job.struck(0)
    _slots(job.folder, 3)


def _kills_rank_1(job: Job) -> None:
    job.struck(0)
    for process in job.processes():
        with contextlib.suppress(OSError):  # for example one that has just ended
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if b"COLLECTIVE_RANK=1" in environment:
                os.kill(process, signal.SIGKILL)


def _ends_the_launcher(job: Job) -> None:
    job.struck(0)
    job.strikes(lambda: os.kill(job.launcher.pid, signal.SIGTERM))


FAULTS = [
    left(0),
    left(1),
    left(0, "mpi"),
    Fault(
        "a slot more, by --host-discovery-script",
        training(*KEPT, *JSON),
        f"a rank is started, and joins; {ALIKE}",
        code=0,
        seconds=None,
        messages=("1 joined; 3 ranks continue from step [89] ",),
        inside="wait-for-newcomer forward 0 7",
        before=lambda folder, _: _slots(folder, 2),
        strike=_a_slot_more,
        holds=no_step_again([2, 3]),
        launcher_options=(
            *("--min-np", "1", "--max-np", "3"),
            *("--host-discovery-script", "cat {folder}/slots"),
        ),
    ),
    Fault(
        "kill -9 of a rank, --max-np 2",
        training(*KEPT, *JSON),
        "the other one waits for one in its place, and both continue; the losses are the "
        "undisturbed ones, and the ledger is perfect",
        code=0,
        seconds=None,
        messages=(
            "rank 1 of 2 died; 1 rank continues from step [78] ",
            "1 joined; 2 ranks continue from step [89] ",
        ),
        inside="wait-for-newcomer forward 0 7",
        strike=_kills_rank_1,
        holds=no_step_again([2, 1, 2]),
        launcher_options=("--min-np", "2", "--max-np", "2"),
    ),
    Fault(
        "SIGTERM to the launcher, --min-np 2",
        training(*KEPT),
        f"every rank ends, with a checkpoint of the last step; {RESUMED}",
        code=128 + signal.SIGTERM,
        seconds=10,
        inside="report forward 0 5",
        strike=_ends_the_launcher,
        holds=goes_on_from_checkpoint,
        ranks=3,
        variables={"FAULT_PACE": "0.3"},
        launcher_options=("--min-np", "2"),
    ),
]
