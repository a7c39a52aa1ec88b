"""Who am I: rank and size as the launcher wrote them into the environment.

Nothing here starts MPI or imports TensorFlow; reading a few variables is enough to
tell mpirun, srun, horovodrun, torchrun and our own launcher apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """The variables a kind of launcher sets, and the name people know it by.

    Attributes:
        name: What the user typed to start the job.
        rank, size, local_rank, local_size: Names of the variables; the local ones
            may be empty where the launcher tells nothing.
        marker: A variable that must be there too, for variables that others set
            as well.
    """

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    marker: str = ""


# The first whose variables are all there wins. Open MPI sets PMIX_RANK too, and a
# job inside a Slurm allocation has SLURM_* whoever started it: the order matters.
LAUNCHERS = (
    Launcher(
        "collectiverun",
        "COLLECTIVE_RANK",
        "COLLECTIVE_SIZE",
        "COLLECTIVE_LOCAL_RANK",
        "COLLECTIVE_LOCAL_SIZE",
    ),
    Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    ),
    # horovodrun handed the job to mpirun (backends/horovod_run.py).
    Launcher(
        "horovodrun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "COLLECTIVE_HOROVODRUN",
    ),
    Launcher(
        "horovodrun",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "COLLECTIVE_HOROVODRUN",
    ),
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
    ),
    Launcher(
        "srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_STEP_ID"
    ),
)


@dataclass(frozen=True)
class Environment:
    """This process' place in the job, as its launcher told it.

    Attributes:
        launcher: ``mpirun``, ``srun``, ``horovodrun``, ``torchrun``,
            ``collectiverun`` or, for a process started alone, ``""``.
        rank, size: Position in the job and number of processes.
        local_rank, local_size: The same within this host.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def launched(self) -> bool:
        """Whether some launcher started this process."""
        return bool(self.launcher)


def detect(variables: Mapping[str, str] | None = None) -> Environment:
    """Reads the environment.

    Args:
        variables: The environment to read; ``os.environ`` by default.

    Returns:
        The place of this process; ``Environment()`` when nothing launched it.
    """
    env = os.environ if variables is None else variables
    for kind in LAUNCHERS:
        if any(
            name and name not in env for name in (kind.rank, kind.size, kind.marker)
        ):
            continue
        rank, size = int(env[kind.rank]), int(env[kind.size])
        local_size = int(env.get(kind.local_size) or _slurm_local_size(env, size))
        local_rank = int(env.get(kind.local_rank) or rank % local_size)
        return Environment(kind.name, rank, size, local_rank, local_size)
    return Environment()


def _slurm_local_size(env: Mapping[str, str], size: int) -> int:
    """Tasks on this node from ``SLURM_STEP_TASKS_PER_NODE`` (``2(x3),1``), or all."""
    first = env.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")[0].split("(")[0]
    return int(first) if first.isdigit() else size


def cores_per_process(environment: Environment) -> int:
    """This process' share of the host's cores, at least 1.

    A launcher that bound the process to some cores has shared them out already;
    otherwise the cores are divided among the processes of this host.
    """
    mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if mine < all_cores:
        return mine
    return max(1, mine // environment.local_size)
