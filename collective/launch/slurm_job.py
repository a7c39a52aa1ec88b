"""Within a Slurm job: srun takes the place of ssh, and Slurm is hidden from mpirun."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

SHELL = Path(__file__).with_name("srun-shell")
# Names the job for ``srun-shell``, because mpirun would read Slurm's own variables.
JOB = "COLLECTIVE_SLURM_JOB"
_CONF = "SLURM_CONF"
# Variables about the job that a script may want to read.
_FOR_RANKS = (
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_SUBMIT_DIR", "SLURM_RESTART_COUNT"),
    *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
)


def shell(variables: Mapping[str, str]) -> str:
    """Return the program that starts a command on a node of the job; or ''."""
    inside = "SLURM_JOB_ID" in variables or JOB in variables
    return str(SHELL) if inside and shutil.which("srun") else ""


def hidden(variables: Mapping[str, str]) -> list[str]:
    """Return the names of Slurm's variables, which are hidden from mpirun.

    Open MPI and MPICH would take the job's hosts in place of the given ones, refuse other
    names, and use launchers of their own.
    """
    return [name for name in variables if name.startswith("SLURM_") and name != _CONF]


def for_mpirun(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that mpirun gets instead, for ``srun-shell``."""
    job = variables.get("SLURM_JOB_ID")
    return {JOB: job} if job else {}


def for_ranks(variables: Mapping[str, str]) -> dict[str, str]:
    """Return Slurm's variables that the ranks get even so."""
    return {name: variables[name] for name in _FOR_RANKS if name in variables}
