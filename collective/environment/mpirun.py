"""mpirun of Open MPI, MPICH and Intel MPI."""

from __future__ import annotations

from typing import ClassVar

from collective.environment.launcher import Launcher


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
        """Not if ``srun --mpi=pmi2`` set the same: its own variables say more."""
        env = self.variables
        by_srun = (
            "MPI_LOCALRANKID" not in env
            and "SLURM_STEP_ID" in env
            and env.get("PMI_RANK") == env.get("SLURM_PROCID")
        )
        return super().started_us() and not by_srun
