"""Within a Slurm job: srun takes the place of ssh, and ``--requeue-on`` starts the job again.

mpirun is to see nothing of Slurm.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from collective.elastic import generations
from collective.errors import UsageError
from collective.launch import processes
from collective.launch.output import print_message

SHELL = Path(__file__).with_name("srun-shell")
# The job, for ``srun-shell``; mpirun would read Slurm's own variables.
JOB = "COLLECTIVE_SLURM_JOB"
_CONF = "SLURM_CONF"
# What a script may want to know of its job.
_FOR_RANKS = (
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_SUBMIT_DIR", "SLURM_RESTART_COUNT"),
    *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
)
_SECONDS = 60.0
_EXAMPLE = "#SBATCH --requeue --signal=B:USR1@120, and collectiverun --requeue-on USR1"


def shell(variables: Mapping[str, str]) -> str:
    """Returns the program that starts a command on a node of the job; or ''."""
    inside = "SLURM_JOB_ID" in variables or JOB in variables
    return str(SHELL) if inside and shutil.which("srun") else ""


def hidden(variables: Mapping[str, str]) -> list[str]:
    """Returns the names of Slurm's variables, which are hidden from mpirun.

    Open MPI and MPICH would take the hosts of the job in place of those that they are
    given, refuse other names, and use launchers of their own.
    """
    return [name for name in variables if name.startswith("SLURM_") and name != _CONF]


def for_mpirun(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that mpirun gets instead, for ``srun-shell``."""
    job = variables.get("SLURM_JOB_ID")
    return {JOB: job} if job else {}


def for_ranks(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns Slurm's variables that the ranks get nevertheless."""
    return {name: variables[name] for name in _FOR_RANKS if name in variables}


def signal_of(name: str) -> signal.Signals:
    """The signal with a name, as Slurm's ``--signal`` takes it.

    Raises:
        UsageError: If a job cannot use it for this.
    """
    text = name.upper().removeprefix("SIG")
    if text not in ("USR1", "USR2", "TERM", "HUP", "CONT"):
        raise UsageError(
            f"--requeue-on {name}: one of USR1, USR2, TERM, HUP and CONT", hint=_EXAMPLE
        )
    return signal.Signals[f"SIG{text}"]


class Requeue:
    """Takes note of the signal, and has Slurm start the job again when the ranks have ended.

    Raises:
        UsageError: Outside of a Slurm job.
    """

    def __init__(self, number: signal.Signals):
        self._number, self._job = number, os.environ.get("SLURM_JOB_ID", "")
        self.requested = False
        if not (self._job and shutil.which("scontrol")):
            raise UsageError(
                "--requeue-on: this is not a Slurm job, which scontrol could requeue",
                hint=_EXAMPLE,
            )

    def listen(self) -> None:
        """Installs the handler of the signal."""
        signal.signal(self._number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if not self.requested:
            self.requested = True
            print_message(
                f"{self._number.name}: every rank saves the step under way and ends, "
                f"and Slurm starts job {self._job} again"
            )

    def finish(self, code: int) -> int:
        """Has the job started again, if its ranks ended for that; returns the exit code."""
        if not self.requested or code != generations.EXIT_CODE:
            return code
        print_message(f"scontrol requeue {self._job}")
        answer = processes.run(["scontrol", "requeue", self._job], _SECONDS)
        if answer.code == 0:
            return 0
        print_message(
            f"Slurm does not start job {self._job} again: {answer.error}\n"
            "HINT: sbatch --requeue, where JobRequeue=0; the checkpoint is there: --resume"
        )
        return generations.EXIT_CODE
