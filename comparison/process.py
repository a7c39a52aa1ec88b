"""One run in processes of its own: with a deadline, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from comparison import commands

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


def run(command: Sequence[str], seconds: float) -> Ended:
    """Runs a command to its end or its deadline. All it has started ends with it.

    Args:
        command: Program and arguments.
        seconds: The deadline.
    """
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            env=commands.environment(),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
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


def _end(process: subprocess.Popen) -> None:
    """Ends what is left of a run: politely, so that launchers end their ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue
    process.wait(10)
