"""mpirun of Open MPI 4 and 5."""

from typing import ClassVar

from collective.environment.base import Launcher


class OpenMPI(Launcher):
    """``OMPI_COMM_WORLD_RANK`` etc.; both versions set the same."""

    name = "mpirun"
    needs: ClassVar[tuple[str, ...]] = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")

    def rank(self) -> int:
        """``OMPI_COMM_WORLD_RANK``."""
        return self.number("OMPI_COMM_WORLD_RANK")

    def size(self) -> int:
        """``OMPI_COMM_WORLD_SIZE``."""
        return self.number("OMPI_COMM_WORLD_SIZE")

    def local_rank(self) -> int:
        """``OMPI_COMM_WORLD_LOCAL_RANK``."""
        return self.number("OMPI_COMM_WORLD_LOCAL_RANK", super().local_rank())

    def local_size(self) -> int:
        """``OMPI_COMM_WORLD_LOCAL_SIZE``."""
        return self.number("OMPI_COMM_WORLD_LOCAL_SIZE", self.size())
