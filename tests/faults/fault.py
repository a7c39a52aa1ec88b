"""A fault: what happens to which job, and what is promised."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests import launch
from tests.faults.job import Job
from tests.hosts.lab import Lab

STEPS, BATCH = 12, 10
FOREVER = 1_000_000  # steps of a job that is to be ended
# Those where every rank trains; horovod needs a build of its own.
PROCESS_BACKENDS = ("native", "mpi", "tf-multiworker")
# What Open MPI leaves in /dev/shm where mpirun itself is killed, or there is none.
OPEN_MPIS = r"sm_segment\..*"


def nothing(*_: Any) -> None:
    """Nothing is done, or has to hold beyond what always must."""


@dataclass(frozen=True)
class Fault:
    """One row of the table in docs/reference/reliability.md.

    Attributes:
        name: What happens.
        program: What each rank runs; ``{folder}`` stands for the job's own folder.
        promise: What follows, in words.
        code: The launcher's exit code; negative where a signal ends the launcher.
        seconds: From the fault until nothing of the job is alive; None where the job
            goes on to its end.
        messages: Patterns that must be found in what it prints.
        inside: What ``tests.faults.inside`` does in the ranks.
        strike: What is done from without, given the job at work.
        holds: What must be true afterwards, given the job that ended.
        backend: In the table; and by default it says which launcher.
        launcher: What starts the ranks; see ``command``.
        launcher_options: Beside their number; ``{folder}`` as above.
        ranks: How many.
        variables: Added to the environment.
        shm: Size of ``/dev/shm``, in the words of mount.
        leaves: A pattern of what others than we may leave in ``/dev/shm``.
        disk: Size of ``{folder}/disk``, a disk of its own; empty: there is none.
        before: Makes ready what the job finds in its folder.
        on_hosts: Whether the program runs by the launcher of a host of the lab.
        needs: Why it cannot be tried here; empty where it can.
    """

    name: str
    program: Sequence[str]
    promise: str
    code: int
    seconds: float | None
    messages: tuple[str, ...] = ()
    inside: str = ""
    strike: Callable[[Job], None] = nothing
    holds: Callable[[Job], None] = nothing
    backend: str = "native"
    launcher: str = ""
    launcher_options: Sequence[str] = ()
    ranks: int = 2
    variables: Mapping[str, str] = field(default_factory=dict)
    shm: str = "1g"
    leaves: str = ""
    disk: str = ""
    before: Callable[[Path, Lab | None], None] = nothing
    on_hosts: bool = False
    needs: Callable[[], str] = lambda: ""

    @property
    def started_by(self) -> str:
        """The launcher, as it is typed."""
        return self.launcher or launch.LAUNCHERS[self.backend]

    @property
    def id(self) -> str:
        """For ``pytest -k``."""
        return f"{self.name}, {self.backend} by {self.started_by}"

    def but(self, **changed: Any) -> Fault:
        """The same with something changed."""
        return replace(self, **changed)

    def command(self, folder: Path, hosts: Lab | None) -> list[str]:
        """The whole command line."""
        program = [word.format(folder=folder) for word in self.program]
        if hosts is not None:
            return hosts.ours("collective.launch", *program)
        before: list[str] = []
        if self.started_by.startswith("collectiverun"):
            before = launch.command("native", self.ranks)
        elif self.started_by in launch.LAUNCHERS.values():
            before = launch.command(self.backend, self.ranks)
        options = [word.format(folder=folder) for word in self.launcher_options]
        return [*before, *options, *program]


# An option of train.py: where it writes its results.
JSON = ("--json", "{folder}/json")


def training(
    *options: str,
    backend: str = "native",
    model: str = "model",
    data: str = "rows",
    steps: int = STEPS,
) -> list[str]:
    """A training by train.py of what is in ``tests.faults.inside``."""
    inside = "tests.faults.inside"
    return [
        *(sys.executable, str(launch.ROOT / "train.py"), "--verbose", "0"),
        *("--backend", backend, "--precision", "float64"),
        *("--global-batch-size", str(BATCH), "--steps", str(steps)),
        *("--model", f"{inside}:{model}", "--data", f"{inside}:{data}"),
        *options,
    ]
