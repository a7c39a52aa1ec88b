"""horovodrun: without MPI (``--gloo``), or with mpirun.

With mpirun it sets no variable of its own; ``COLLECTIVE_HOROVODRUN`` is set where this
project has horovodrun start the job.
"""

from collections.abc import Mapping

from collective.environment.base import Launcher
from collective.environment.hydra import Hydra
from collective.environment.openmpi import OpenMPI

# Beside ``HOROVOD_RANK`` etc. where collectiverun has set them, for scripts to read.
SET_BY_US = "COLLECTIVE_SETS_HOROVOD_RANK"


def without_mpi(variables: Mapping[str, str]) -> bool:
    """Whether horovodrun started this process without mpirun."""
    return "HOROVOD_RANK" in variables and SET_BY_US not in variables


class HorovodGloo(Launcher):
    """``HOROVOD_RANK`` etc."""

    name = "horovodrun"
    needs = ("HOROVOD_RANK", "HOROVOD_SIZE")

    def started_us(self) -> bool:
        """Not where the variables are those that collectiverun sets."""
        return super().started_us() and SET_BY_US not in self.variables

    def rank(self) -> int:
        """``HOROVOD_RANK``."""
        return self.number("HOROVOD_RANK")

    def size(self) -> int:
        """``HOROVOD_SIZE``."""
        return self.number("HOROVOD_SIZE")

    def local_rank(self) -> int:
        """``HOROVOD_LOCAL_RANK``."""
        return self.number("HOROVOD_LOCAL_RANK", super().local_rank())

    def local_size(self) -> int:
        """``HOROVOD_LOCAL_SIZE``."""
        return self.number("HOROVOD_LOCAL_SIZE", self.size())

    def cross(self) -> tuple[int, int]:
        """``HOROVOD_CROSS_RANK`` and ``HOROVOD_CROSS_SIZE``."""
        if "HOROVOD_CROSS_RANK" not in self.variables:
            return -1, -1
        return self.number("HOROVOD_CROSS_RANK"), self.number("HOROVOD_CROSS_SIZE")


class HorovodOpenMPI(OpenMPI):
    """horovodrun that has started Open MPI's mpirun."""

    name = "horovodrun"
    needs = (*OpenMPI.needs, "COLLECTIVE_HOROVODRUN")


class HorovodHydra(Hydra):
    """horovodrun that has started the mpirun of MPICH or Intel MPI."""

    name = "horovodrun"
    needs = (*Hydra.needs, "COLLECTIVE_HOROVODRUN")
