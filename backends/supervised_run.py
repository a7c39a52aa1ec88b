"""One run in processes of its own: with a deadline, and nothing left behind."""

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
class Ended:
    """How a run ended.

    Attributes:
        code: Exit status; None when it was ended at its deadline.
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
) -> Ended:
    """Runs a command to its end or its deadline. All it has started ends with it.

    Args:
        command: Program and arguments.
        seconds: The deadline.
        variables: Its environment; ``starting.environment()`` by default.
        cores: Those it may use; by default those of this process.
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
            preexec_fn=lambda: _tie(parent, cores),
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
    return Ended(code, "\n".join(text.splitlines()[-TAIL:]))


def _tie(parent: int, cores: Sequence[int]) -> None:
    """In a new process: ends politely when its parent is gone, and runs on its cores."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if cores:
        os.sched_setaffinity(0, cores)
    if os.getppid() != parent:
        os._exit(1)


def _end(process: subprocess.Popen) -> None:
    """Ends what is left of a run: politely, so that launchers end their ranks.

    horovodrun ends before its mpirun, which still has the ranks' shared memory to
    remove: so it is all of the group that is waited for.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _is_there(process, number):
            break
        end = time.monotonic() + GRACE_SECONDS
        while _is_there(process, 0) and time.monotonic() < end:
            time.sleep(0.02)
    process.wait(10)


def _is_there(process: subprocess.Popen, number: int) -> bool:
    """Whether any of the group was there to get the signal; 0: to be asked."""
    process.poll()  # else it would be there for as long as nobody has heard of its end
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
