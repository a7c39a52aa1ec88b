"""What to type to start a training on each backend."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from backends.base import Availability
from backends.registry import BACKENDS
from collective.environment import Environment

ROOT = Path(__file__).resolve().parent.parent


def line(backend: str, processes: int, program: Sequence[str]) -> list[str]:
    """The command that starts a Python program on so many replicas of a backend.

    Args:
        backend: One of ``BACKENDS``.
        processes: Replicas: processes, or devices of one process.
        program: Arguments for Python, the backend's options not among them.
    """
    kind = BACKENDS[backend]
    options = ["--backend", backend]
    if not kind.launcher and backend != "single":
        options += ["--devices", str(processes)]
    python = [sys.executable, *program, *options]
    if not kind.launcher:
        return python
    if kind.launcher == "collectiverun":
        start = [sys.executable, "-m", "collective.launch"]
    else:
        start = [program_beside_python(kind.launcher) or kind.launcher]
    return [*start, "-np", str(processes), *python]


def availability(backend: str, processes: int) -> Availability:
    """Whether ``line`` can work here."""
    kind = BACKENDS[backend]
    if not kind.launcher:
        return kind.availability(Environment())
    if kind.launcher != "collectiverun" and not program_beside_python(kind.launcher):
        return Availability(False, f"there is no {kind.launcher}", "make train")
    return kind.availability(Environment(kind.launcher, 0, processes, 0, processes))


def program_beside_python(name: str) -> str | None:
    """A program of this environment, or else one on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def environment() -> dict[str, str]:
    """The variables of a run: those of this process, and what MPI asks of root."""
    env = dict(os.environ)
    # As where the environment is activated: horovodrun looks for mpirun there.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    if os.geteuid() == 0:
        env.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        env.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    env["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), env.get("PYTHONPATH")])
    )
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return env
