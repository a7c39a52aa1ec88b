"""Starts a job of a backend: its command and environment, and a supervised run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import collective
from collective import python_command
from collective.backends.registry import BACKENDS, ranks
from collective.launch import processes

GRACE_SECONDS = 5
TAIL = 30  # lines of a failed run that are kept
# Ranks import this package from this folder.
ROOT = Path(collective.__file__).resolve().parent.parent


def command_line(backend: str, replicas: int, program: Sequence[str]) -> list[str]:
    """Return the command that starts a Python program on a backend.

    Args:
        backend: One of ``BACKENDS``.
        replicas: The number of processes, or of devices of one process.
        program: Arguments for Python, without the backend's options.
    """
    launcher = BACKENDS[backend].launcher
    options = ["--backend", backend]
    if not launcher and not BACKENDS[backend].one_replica:
        options += ["--devices", str(replicas)]
    python = [sys.executable, *program, *options]
    if not launcher:
        return python
    if launcher == "collectiverun":
        start = python_command.command("collective.launch")
    else:
        start = [processes.find_program(launcher) or launcher]
    return [*start, "-np", str(ranks(backend, replicas)), *python]


def environment() -> dict[str, str]:
    """Return this process' variables, and those by which a run finds this package."""
    env = dict(os.environ)
    # As in an activated environment, because horovodrun looks for mpirun there.
    path = [str(Path(sys.executable).parent), env.get("PATH", os.defpath)]
    env["PATH"] = os.pathsep.join(path)
    if os.geteuid() == 0:
        env.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        env.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    env["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), env.get("PYTHONPATH")])
    )
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return env


@dataclass(frozen=True)
class CompletedRun:
    """How a run ended."""

    code: int | None  # None when it was killed at its deadline
    tail: str  # the last lines it printed

    @property
    def failure(self) -> str:
        """Return the cause of a failure in a few words; empty after a success."""
        if self.code == 0:
            return ""
        if self.code is None:
            return "did not end in time"
        return f"ended with exit code {self.code}"


def run(command: Sequence[str], seconds: float) -> CompletedRun:
    """Run a command to its end or its deadline; end every process that it started."""
    with tempfile.TemporaryFile() as printed:
        process = processes.start(
            command,
            on_parent_death=signal.SIGTERM,  # so that launchers end their ranks
            env=environment(),
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
