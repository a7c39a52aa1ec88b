"""Any launcher that speaks PMIx and says nothing else, as PRRTE's ``prterun``."""

from collective.environment.base import Launcher
from collective.errors import UsageError


class PMIx(Launcher):
    """``PMIX_RANK``; PMIx tells the size by a library, not by a variable."""

    name = "PMIx"
    needs = ("PMIX_RANK", "PMIX_NAMESPACE")

    def rank(self) -> int:
        """``PMIX_RANK``."""
        return self.number("PMIX_RANK")

    def size(self) -> int:
        """``COLLECTIVE_SIZE``, which the user has to give.

        Raises:
            UsageError: Without it: this might be one process or one of many.
        """
        if "COLLECTIVE_SIZE" not in self.variables:
            raise UsageError(
                f"a PMIx launcher started rank {self.rank()} and left the number of "
                "ranks out of the environment",
                hint="start the job by mpirun or srun, or: export COLLECTIVE_SIZE=4",
            )
        return self.number("COLLECTIVE_SIZE")

    def local_rank(self) -> int:
        """``COLLECTIVE_LOCAL_RANK``, if given."""
        return self.number("COLLECTIVE_LOCAL_RANK", super().local_rank())

    def local_size(self) -> int:
        """``COLLECTIVE_LOCAL_SIZE``, if given; else all are taken to be here."""
        return self.number("COLLECTIVE_LOCAL_SIZE", self.size())
