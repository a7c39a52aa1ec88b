"""Launchers of which only PMIx' variables are known."""

from __future__ import annotations

from collective.environment.collectiverun import CollectiveRun
from collective.environment.launcher import Launcher
from collective.errors import UsageError


class PMIx(Launcher):
    """Any launcher that sets only PMIx' variables, as PRRTE's ``prterun``.

    PMIx has a library call for the size, not a variable: the user has to set it.
    """

    name = "PMIx"
    needs = ("PMIX_RANK", "PMIX_NAMESPACE")
    local = CollectiveRun.local

    def size(self) -> int:
        """``COLLECTIVE_SIZE``; without it this may be one process or one of many."""
        if "COLLECTIVE_SIZE" not in self.variables:
            raise UsageError(
                f"a PMIx launcher started rank {self.rank()} without the number of "
                "ranks in the environment",
                hint="start the job by mpirun or srun, or: export COLLECTIVE_SIZE=4",
            )
        return self.number("COLLECTIVE_SIZE")
