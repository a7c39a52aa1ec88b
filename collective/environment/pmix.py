"""Any launcher that sets only PMIx' variables, as PRRTE's ``prterun``."""

from collective.environment.base import Launcher
from collective.errors import UsageError


class PMIx(Launcher):
    """``PMIX_RANK``; PMIx has a library call for the size, not a variable."""

    name = "PMIx"
    needs = ("PMIX_RANK", "PMIX_NAMESPACE")

    def rank(self) -> int:
        """``PMIX_RANK``."""
        return self.number("PMIX_RANK")

    def size(self) -> int:
        """``COLLECTIVE_SIZE``, which the user has to set.

        Raises:
            UsageError: Without it: this may be one process or one of many.
        """
        if "COLLECTIVE_SIZE" not in self.variables:
            raise UsageError(
                f"a PMIx launcher started rank {self.rank()} without the number of "
                "ranks in the environment",
                hint="start the job by mpirun or srun, or: export COLLECTIVE_SIZE=4",
            )
        return self.number("COLLECTIVE_SIZE")

    def local_rank(self) -> int:
        """``COLLECTIVE_LOCAL_RANK``, if given."""
        return self.number("COLLECTIVE_LOCAL_RANK", super().local_rank())

    def local_size(self) -> int:
        """``COLLECTIVE_LOCAL_SIZE``, if given; else all ranks count as local."""
        return self.number("COLLECTIVE_LOCAL_SIZE", self.size())
