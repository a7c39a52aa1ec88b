"""How to start a Python program on each backend: the command and its environment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import collective
from collective.backends.base import Availability
from collective.backends.registry import BACKENDS
from collective.environment import Environment
from collective.launch import programs

# The folder from which ranks import this package.
ROOT = Path(collective.__file__).resolve().parent.parent
# What launchers leave in the environment of a rank.
OF_A_RANK = re.compile(
    "OMPI_(?!ALLOW)|PMI|PRTE_|SLURM_|TF_CONFIG$|TORCHELASTIC_|MPI_LOCAL"
    "|((COLLECTIVE|HOROVOD)_)?(LOCAL_|CROSS_|GROUP_)?(RANK|SIZE|WORLD_SIZE)$"
    "|COLLECTIVE_(JOB|HOROVODRUN|RANKS_PER_HOST|MIN_NP|MAX_NP|JOINS|BOARD)$"
    "|HOROVOD_(GLOO_|HOSTNAME|CONTROLLER|CPU_OPERATIONS)|MASTER_(ADDR|PORT)$"
)


def line(
    backend: str, processes: int, program: Sequence[str], launcher: str = ""
) -> list[str]:
    """The command that starts a Python program on so many replicas of a backend.

    Args:
        backend: One of ``BACKENDS``, or ``auto`` with a launcher.
        processes: Replicas: processes, or devices of one process.
        program: Arguments for Python, the backend's options not among them.
        launcher: What starts the processes; by default what the backend wants.
    """
    launcher = launcher or BACKENDS[backend].launcher
    options = ["--backend", backend]
    if not launcher and not BACKENDS[backend].one_replica:
        options += ["--devices", str(processes)]
    python = [sys.executable, *program, *options]
    if not launcher:
        return python
    if launcher == "collectiverun":
        start = [sys.executable, "-m", "collective.launch"]
    else:
        start = [programs.find(launcher) or launcher]
    ranks = processes if backend == "auto" else BACKENDS[backend].ranks(processes)
    return [*start, "-np", str(ranks), *python]


def availability(backend: str, processes: int) -> Availability:
    """Whether ``line`` can work here."""
    kind = BACKENDS[backend]
    if not kind.launcher:
        return kind.availability(Environment())
    if kind.launcher != "collectiverun" and not programs.find(kind.launcher):
        made_by = "make horovod" if kind.launcher == "horovodrun" else "make train"
        return Availability(False, f"there is no {kind.launcher}", made_by)
    ranks = kind.ranks(processes)
    return kind.availability(Environment(kind.launcher, 0, ranks, 0, ranks))


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a run, and what MPI asks of root.

    Args:
        variables: Those it has anyway; by default those of this process.
    """
    env = dict(os.environ if variables is None else variables)
    # As where the environment is activated: horovodrun looks for mpirun there.
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


def unlaunched(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank without its place: a job that it starts is a new one."""
    return {k: v for k, v in variables.items() if not OF_A_RANK.match(k)}
