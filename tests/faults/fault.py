"""A fault: the job, the event, and the promise."""

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
FOREVER = 1_000_000  # steps of a job that a fault ends
# Backends in which every rank trains; horovod needs a build of its own.
PROCESS_BACKENDS = ("native", "mpi", "tf-multiworker")
# Files that Open MPI leaves in /dev/shm if mpirun is killed, or absent.
OPEN_MPIS = r"sm_segment\..*"


def nothing(*_: Any) -> None:
    """Do nothing, or check nothing more than always."""


@dataclass(frozen=True)
class Fault:
    """One row of the table in docs/reference/reliability.md.

    Attributes:
        name: The event.
        program: The program of each rank; ``{folder}`` stands for the job's own folder.
        promise: The promised outcome, in words.
        code: The launcher's exit code; negative if a signal ends the launcher.
        seconds: From the fault until no process of the job is alive; None if the job
            continues to its end.
        messages: Patterns that its output must contain.
        inside: The action of ``tests.faults.inside`` in the ranks.
        strike: Injects the fault from outside, given the running job.
        holds: Checks the state afterwards, given the job that has ended.
        backend: Its name in the table; it implies the launcher by default.
        launcher: The program that starts the ranks; see ``command``.
        launcher_options: Options in addition to their number; ``{folder}`` as above.
        ranks: Number of ranks.
        variables: Variables added to the environment.
        shm: Size of ``/dev/shm``, as mount's option.
        leaves: A pattern of files that other programs may leave in ``/dev/shm``.
        disk: Size of ``{folder}/disk``, a separate disk; empty: there is none.
        before: Prepares the files in the job's folder.
        on_hosts: Whether the launcher on a host of the lab runs the program.
        needs: Returns why it cannot be tried here; empty if it can.
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
        """Return the launcher as a user types it."""
        return self.launcher or launch.LAUNCHERS[self.backend]

    @property
    def id(self) -> str:
        """Return its name for ``pytest -k``."""
        return f"{self.name}, {self.backend} by {self.started_by}"

    def but(self, **changed: Any) -> Fault:
        """Return the same fault with changes."""
        return replace(self, **changed)

    def command(self, folder: Path, hosts: Lab | None) -> list[str]:
        """Return the whole command line."""
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


# An option of train.py: the file for its results.
JSON = ("--json", "{folder}/json")


def training(
    *options: str,
    backend: str = "native",
    model: str = "model",
    data: str = "rows",
    steps: int = STEPS,
) -> list[str]:
    """Return a command of train.py with the model of ``tests.faults.inside``."""
    inside = "tests.faults.inside"
    return [
        *(sys.executable, str(launch.ROOT / "train.py"), "--verbose", "0"),
        *("--backend", backend, "--precision", "float64"),
        *("--global-batch-size", str(BATCH), "--steps", str(steps)),
        *("--model", f"{inside}:{model}", "--data", f"{inside}:{data}"),
        *options,
    ]
