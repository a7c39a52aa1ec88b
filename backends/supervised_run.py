"""One run in its own processes, with a deadline; none of them outlives it."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collective.backends import launch_command
from collective.launch import processes

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
        process = processes.start(
            command,
            on_parent_death=signal.SIGTERM,  # so that launchers end their ranks
            cores=cores,
            env=launch_command.environment() if variables is None else variables,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            processes.end_group(process, GRACE_SECONDS)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    return CompletedRun(code, "\n".join(text.splitlines()[-TAIL:]))
