"""horovodrun, by Gloo or by an mpirun that it starts."""

from __future__ import annotations

from collective.environment.base import SETS_HOROVOD_RANK
from collective.environment.launcher import Launcher
from collective.environment.mpirun import Hydra, OpenMPI


class HorovodGloo(Launcher):
    """horovodrun without MPI. With mpirun it sets no variable of its own."""

    name = "horovodrun"
    needs = ("HOROVOD_RANK", "HOROVOD_SIZE")
    local = ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    across = ("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")

    def started_us(self) -> bool:
        """Not where the variables are those that collectiverun sets."""
        return super().started_us() and SETS_HOROVOD_RANK not in self.variables


class HorovodOpenMPI(OpenMPI):
    """horovodrun that has started Open MPI's mpirun, where this project started it."""

    name = "horovodrun"
    needs = (*OpenMPI.needs, "COLLECTIVE_HOROVODRUN")


class HorovodHydra(Hydra):
    """horovodrun that has started the mpirun of MPICH or Intel MPI."""

    name = "horovodrun"
    needs = (*Hydra.needs, "COLLECTIVE_HOROVODRUN")
