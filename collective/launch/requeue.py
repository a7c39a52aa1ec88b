"""``--requeue-on USR1``: at a signal the ranks save a checkpoint, and Slurm starts the job again."""

from __future__ import annotations

import os
import shutil
import signal

from collective.elastic import generations
from collective.errors import UsageError
from collective.launch import processes
from collective.launch.output import print_message

_SECONDS = 60.0
_EXAMPLE = "#SBATCH --requeue --signal=B:USR1@120, and collectiverun --requeue-on USR1"


def signal_of(name: str) -> signal.Signals:
    """The signal with a name, as Slurm's ``--signal`` takes it.

    Raises:
        UsageError: If it is none that a job may use so.
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
        """From now on the signal is noted."""
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
