"""All launchers, the innermost first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from collective.environment.base import JOINS, SETS_HOROVOD_RANK, Environment
from collective.environment.launcher import Launcher
from collective.environment.slurm import Slurm
from collective.environment.tf_config import TFConfig
from collective.errors import UsageError


class CollectiveRun(Launcher):
    """Our own launcher, on one host. Across hosts it starts mpirun."""

    name = "collectiverun"
    needs = ("COLLECTIVE_RANK", "COLLECTIVE_SIZE")
    local = ("COLLECTIVE_LOCAL_RANK", "COLLECTIVE_LOCAL_SIZE")

    def environment(self) -> Environment:
        """Return ranks and sizes; ``COLLECTIVE_JOINS`` marks a process that joins."""
        joining = JOINS in self.variables
        return dataclasses.replace(super().environment(), joining=joining)


class OpenMPI(Launcher):
    """mpirun of Open MPI 4 and 5."""

    name = "mpirun"
    needs: ClassVar[tuple[str, ...]] = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


class Hydra(Launcher):
    """mpirun of MPICH and of Intel MPI."""

    name = "mpirun"
    needs: ClassVar[tuple[str, ...]] = ("PMI_RANK", "PMI_SIZE")
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")

    def started_us(self) -> bool:
        """Return False if ``srun --mpi=pmi2`` set the variables, and tells more."""
        env = self.variables
        by_srun = (
            "MPI_LOCALRANKID" not in env
            and "SLURM_STEP_ID" in env
            and env.get("PMI_RANK") == env.get("SLURM_PROCID")
        )
        return super().started_us() and not by_srun


class HorovodGloo(Launcher):
    """horovodrun without MPI. With mpirun it sets no variable of its own."""

    name = "horovodrun"
    needs = ("HOROVOD_RANK", "HOROVOD_SIZE")
    local = ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    across = ("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")

    def started_us(self) -> bool:
        """Return False if collectiverun has set the variables."""
        return super().started_us() and SETS_HOROVOD_RANK not in self.variables


class HorovodOpenMPI(OpenMPI):
    """horovodrun that has started Open MPI's mpirun, in a job of this project."""

    name = "horovodrun"
    needs = (*OpenMPI.needs, "COLLECTIVE_HOROVODRUN")


class HorovodHydra(Hydra):
    """horovodrun that has started the mpirun of MPICH or Intel MPI."""

    name = "horovodrun"
    needs = (*Hydra.needs, "COLLECTIVE_HOROVODRUN")


class TorchRun(Launcher):
    """torchrun. CI systems may set RANK too, so MASTER_ADDR must be set as well.

    A ``GROUP`` is the ranks that one agent started.
    """

    name = "torchrun"
    needs = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    across = ("GROUP_RANK", "GROUP_WORLD_SIZE")


class PMIx(Launcher):
    """Any launcher that sets only PMIx' variables, as PRRTE's ``prterun``.

    PMIx has a library call for the size, but no variable: the user has to set it.
    """

    name = "PMIx"
    needs = ("PMIX_RANK", "PMIX_NAMESPACE")
    local = CollectiveRun.local

    def size(self) -> int:
        """Return ``COLLECTIVE_SIZE``; without it the size is not known."""
        if "COLLECTIVE_SIZE" not in self.variables:
            raise UsageError(
                f"a PMIx launcher started rank {self.rank()} without the number of "
                "ranks in the environment",
                hint="start the job by mpirun or srun, or: export COLLECTIVE_SIZE=4",
            )
        return self.number("COLLECTIVE_SIZE")


# The first launcher whose variables are set wins. Open MPI sets PMIX_RANK too, and
# every job in a Slurm allocation has SLURM_*, so inner launchers come before outer
# ones.
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


def find_launcher(variables: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started a process with this environment, or None."""
    return next((k(variables) for k in LAUNCHERS if k(variables).started_us()), None)
