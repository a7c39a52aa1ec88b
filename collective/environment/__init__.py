"""Who am I: rank and size as the launcher wrote them into the environment.

Nothing here starts MPI or imports TensorFlow; reading a few variables is enough to
tell mpirun, srun, horovodrun, torchrun and our own launcher apart. One file for each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from collective.environment.base import Environment as Environment
from collective.environment.base import Launcher as Launcher
from collective.environment.collectiverun import CollectiveRun
from collective.environment.horovodrun import HorovodGloo, HorovodHydra, HorovodOpenMPI
from collective.environment.hydra import Hydra
from collective.environment.openmpi import OpenMPI
from collective.environment.pmix import PMIx
from collective.environment.slurm import Slurm
from collective.environment.tf_config import TFConfig
from collective.environment.torchrun import TorchRun

# The first that was there wins. Open MPI sets PMIX_RANK too, and a job inside a Slurm
# allocation has SLURM_* whoever started it: the innermost launcher comes first.
LAUNCHERS: tuple[type[Launcher], ...] = (
    CollectiveRun,
    HorovodGloo,
    HorovodOpenMPI,
    HorovodHydra,
    OpenMPI,
    Hydra,
    TorchRun,
    Slurm,
    PMIx,
    TFConfig,
)


def launcher(variables: Mapping[str, str] | None = None) -> Launcher | None:
    """The launcher that started this process; None when nothing did.

    Args:
        variables: The environment to read; ``os.environ`` by default.
    """
    env = os.environ if variables is None else variables
    return next((kind(env) for kind in LAUNCHERS if kind(env).was_here()), None)


def detect(variables: Mapping[str, str] | None = None) -> Environment:
    """Reads the environment.

    Args:
        variables: The environment to read; ``os.environ`` by default.

    Returns:
        The place of this process; ``Environment()`` when nothing launched it.

    Raises:
        UsageError: Where a variable holds no number, or no possible one.
    """
    found = launcher(variables)
    return found.environment() if found else Environment()


def cores_per_process(environment: Environment) -> int:
    """This process' share of the host's cores, at least 1.

    A launcher that bound the process to some cores has shared them out already;
    otherwise the cores are divided among the processes of this host.
    """
    mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if mine < all_cores:
        return mine
    return max(1, mine // environment.local_size)
