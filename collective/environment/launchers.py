"""All launchers, the innermost first."""

from __future__ import annotations

from collective.environment.collectiverun import CollectiveRun
from collective.environment.horovodrun import (
    HorovodGloo,
    HorovodHydra,
    HorovodOpenMPI,
)
from collective.environment.launcher import Launcher
from collective.environment.mpirun import Hydra, OpenMPI
from collective.environment.pmix import PMIx
from collective.environment.slurm import Slurm
from collective.environment.tf_config import TFConfig
from collective.environment.torchrun import TorchRun

# The first whose variables are set wins. Open MPI sets PMIX_RANK too, and every job in a
# Slurm allocation has SLURM_*: so inner launchers come before outer ones.
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
