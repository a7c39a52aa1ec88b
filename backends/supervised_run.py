"""One run in its own processes, with a deadline; none of them outlives it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collective.backends import launch_command

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 5
TAIL = 30  # lines of a failed run that are kept


@dataclass(frozen=True)
class CompletedRun:
    """How a run ended.

    Attributes:
        code: Exit status; None when it was killed at its deadline.
        tail: The last lines it printed.
    """

    code: int | None
    tail: str

    @property
    def failure(self) -> str:
        """What went wrong in a few words; empty when nothing did."""
        if self.code == 0:
            return ""
        if self.code is None:
            return "did not end in time"
        return f"ended with exit code {self.code}"


def run(
    command: Sequence[str],
    seconds: float,
    variables: Mapping[str, str] | None = None,
    cores: Sequence[int] = (),
) -> CompletedRun:
    """Runs a command to its end or its deadline. Every process it started ends with it.

    Args:
        command: Program and arguments.
        seconds: The deadline.
        variables: Its environment; ``launch_command.environment()`` by default.
        cores: The cores it may use; by default those of this process.
    """
    with tempfile.TemporaryFile() as printed:
        parent = os.getpid()
        process = subprocess.Popen(
            command,
            env=launch_command.environment() if variables is None else variables,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _bind_to_parent(parent, cores),
        )
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    return CompletedRun(code, "\n".join(text.splitlines()[-TAIL:]))


def _bind_to_parent(parent: int, cores: Sequence[int]) -> None:
    """In the new process: SIGTERM when its parent ends; runs on the given cores."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if cores:
        os.sched_setaffinity(0, cores)
    if os.getppid() != parent:
        os._exit(1)


def _end(process: subprocess.Popen) -> None:
    """Ends the rest of a run: first by SIGTERM, so that launchers end their ranks.

    horovodrun ends before its mpirun, which still has to remove the ranks' shared
    memory: so this waits for the whole process group.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _signal_group(process, number):
            break
        end = time.monotonic() + GRACE_SECONDS
        while _signal_group(process, 0) and time.monotonic() < end:
            time.sleep(0.02)
    process.wait(10)


def _signal_group(process: subprocess.Popen, number: int) -> bool:
    """Sends a signal, or 0 for none; whether any process of the group still exists."""
    process.poll()  # a process that has ended exists until its status was read
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
