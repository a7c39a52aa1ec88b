"""Starts jobs here, and on Horovod itself."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 1200
# Variables that example.py reads in each rank.
WORD, EVENTS = "EXAMPLE_WORD", "EXAMPLE_EVENTS"


@dataclasses.dataclass(frozen=True)
class Job:
    """A way to start two ranks.

    Attributes:
        name: Its name in the table.
        word: ``collective``, or ``horovod`` for Horovod itself.
        words: The command line before the program.
    """

    name: str
    word: str
    words: tuple[str, ...]

    @property
    def launcher(self) -> tuple[str, ...]:
        """Return the launcher without a number of ranks."""
        return self.words[: self.words.index("-np")]


_MPIRUN = ("mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2")
JOBS = (
    Job(
        "collectiverun",
        "collective",
        (sys.executable, "-m", "collective.launch", "-np", "2"),
    ),
    Job("mpirun", "collective", _MPIRUN),
)
HOROVOD = Job("Horovod itself", "horovod", _MPIRUN)


@dataclasses.dataclass
class Ended:
    """A job that has ended.

    Attributes:
        code: Its exit code; None if it did not end in time, and was killed.
        stdout, stderr: Its output.
    """

    code: int | None
    stdout: str
    stderr: str

    @property
    def tail(self) -> str:
        """Return its last lines."""
        late = "" if self.code is not None else f"no end within {SECONDS} s\n"
        return late + "\n".join((self.stdout + self.stderr).splitlines()[-12:])


@contextlib.contextmanager
def started(
    command: list[str],
    folder: Path,
    job: Job,
    path: list[str] | None = None,
    more: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start a job in a process group of its own, which is killed at the end."""
    own = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*(path or ()), str(ROOT), *own]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "HOME": str(folder),  # an example locks a file there
        WORD: job.word,
        **(more or {}),
    }
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run(
    command: list[str], folder: Path, job: Job, path: list[str] | None = None
) -> Ended:
    """Start a job, and wait for its end."""
    with started(command, folder, job, path) as process:
        return ended(process)


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for the end of a job."""
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
        return Ended(process.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            stdout, stderr = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
        return Ended(None, stdout, stderr)
