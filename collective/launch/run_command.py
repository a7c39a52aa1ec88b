"""Runs a program for its answer, and never waits for it for ever."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What a program answered.

    Attributes:
        code: Its exit code; None where it did not run, or not to its end.
        out: What it wrote to its standard output.
        said: What it wrote to its error stream, in one line; or why it did not run.
    """

    code: int | None
    out: str = ""
    said: str = ""


def ask(command: Sequence[str], seconds: float, given: str = "") -> Answer:
    """Runs a command for so many seconds at most. Never raises.

    Args:
        command: The program and its arguments, which all users of the machine see.
        seconds: After which it is ended.
        given: What it can read from its standard input.
    """
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, said=f"no answer in {seconds:g} s")
    except OSError as error:
        return Answer(None, said=f"{command[0]}: {error.strerror}")
    return Answer(done.returncode, done.stdout, " ".join(done.stderr.split()))
