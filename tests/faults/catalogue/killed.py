"""Ranks that end, by whatever hand."""

from __future__ import annotations

import signal

from tests import launch
from tests.faults.fault import Fault, training
from tests.faults.undisturbed import goes_on_alike, goes_on_from_checkpoint

KEPT = (
    *("--checkpoint-dir", "{folder}/runs", "--checkpoint-every", "3"),
    *("--ledger", "{folder}/ledger"),
)
RESUMED = "--resume gives the undisturbed losses, and the ledger is perfect"
# Each launcher's message about a killed rank.
NAMED = {
    "collectiverun": "rank {} failed: it ended by SIGKILL",
    "mpirun": "rank {} with PID .* exited on\n? *signal 9",
    "horovodrun": "",  # either of two launchers, each with its own message
}


def killed(place: str, rank: int, backend: str = "native", launcher: str = "") -> Fault:
    by = launcher or launch.LAUNCHERS[backend]
    return Fault(
        f"kill -9 of rank {rank} in {place}",
        training(*KEPT, backend=backend),
        f"the job ends, and names the rank; {RESUMED}",
        code=128 + signal.SIGKILL,
        seconds=5 if backend == "native" else 10,
        # It is killed while it writes the first checkpoint.
        messages=(
            NAMED[by].format(rank),
            *(["HINT: .*--resume continues from .*runs"] * (place != "checkpoint")),
        ),
        # Rows are read before the step needs them, and a checkpoint must exist.
        inside=f"kill {place} {rank} {11 if place == 'input' else 7}",
        holds=goes_on_from_checkpoint,
        backend=backend,
        launcher=launcher,
    )


PLACES = ("input", "forward", "all-reduce", "update", "checkpoint")


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
        messages=(r"rank [12] failed: it ended by SIGKILL",),
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
        messages=("rank 1 failed: it ended by SIGSEGV",),
        inside="crash forward 1 5",
    ),
    Fault(
        "a rank leaves with exit code 0 in the middle",
        training(),
        "the job ends, and names the rank",
        code=1,
        seconds=5,
        messages=(r"rank 1 \(process \d+\) died", "HINT"),
        inside="leave forward 1 5",
    ),
    Fault(
        "an error in one rank's own code",
        training(),
        "the job ends with that rank's traceback",
        code=1,
        seconds=5,
        messages=("RuntimeError: made to fail", "rank 1"),
        inside="raise forward 1 5",
    ),
    Fault(
        "SIGTERM to one rank",
        training(*KEPT),
        f"the job ends, and names the rank; {RESUMED}",
        code=128 + signal.SIGTERM,
        seconds=5,
        messages=("rank 1 failed: it ended by SIGTERM",),
        inside="terminate forward 1 7",
        holds=goes_on_from_checkpoint,
    ),
]
