"""Within a Slurm job: srun takes the place of ssh, and mpirun sees nothing of Slurm."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

SHELL = Path(__file__).with_name("srun-shell")
# The job, for ``srun-shell``; mpirun would read Slurm's own variables.
JOB = "COLLECTIVE_SLURM_JOB"
_CONF = "SLURM_CONF"
# What a script may want to know of its job.
_FOR_RANKS = (
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_SUBMIT_DIR", "SLURM_RESTART_COUNT"),
    *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
)


def shell(variables: Mapping[str, str]) -> str:
    """Returns the program that starts a command on a node of the job; or ''."""
    inside = "SLURM_JOB_ID" in variables or JOB in variables
    return str(SHELL) if inside and shutil.which("srun") else ""


def hidden(variables: Mapping[str, str]) -> list[str]:
    """Returns the names of Slurm's variables, which are hidden from mpirun.

    Open MPI and MPICH would take the hosts of the job in place of those that they are
    given, refuse other names, and use launchers of their own.
    """
    return [name for name in variables if name.startswith("SLURM_") and name != _CONF]


def for_mpirun(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that mpirun gets instead, for ``srun-shell``."""
    job = variables.get("SLURM_JOB_ID")
    return {JOB: job} if job else {}


def for_ranks(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns Slurm's variables that the ranks get nevertheless."""
    return {name: variables[name] for name in _FOR_RANKS if name in variables}
