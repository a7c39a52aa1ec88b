"""mpirun of MPICH and of Intel MPI: both are Hydra."""

from typing import ClassVar

from collective.environment.base import Launcher


class Hydra(Launcher):
    """``PMI_RANK`` etc."""

    name = "mpirun"
    needs: ClassVar[tuple[str, ...]] = ("PMI_RANK", "PMI_SIZE")

    def started_us(self) -> bool:
        """Not if ``srun --mpi=pmi2`` set the same: its own variables say more."""
        env = self.variables
        by_srun = (
            "MPI_LOCALRANKID" not in env
            and "SLURM_STEP_ID" in env
            and env.get("PMI_RANK") == env.get("SLURM_PROCID")
        )
        return super().started_us() and not by_srun

    def rank(self) -> int:
        """``PMI_RANK``."""
        return self.number("PMI_RANK")

    def size(self) -> int:
        """``PMI_SIZE``."""
        return self.number("PMI_SIZE")

    def local_rank(self) -> int:
        """``MPI_LOCALRANKID``."""
        return self.number("MPI_LOCALRANKID", super().local_rank())

    def local_size(self) -> int:
        """``MPI_LOCALNRANKS``."""
        return self.number("MPI_LOCALNRANKS", self.size())
