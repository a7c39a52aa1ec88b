"""Our own launcher, on one host: ``python -m collective.launch``."""

from __future__ import annotations

import dataclasses

from collective.environment.base import Environment, Launcher

# Set for a process that joins a running job.
JOINS = "COLLECTIVE_JOINS"


class CollectiveRun(Launcher):
    """``COLLECTIVE_RANK`` etc. Across hosts it starts mpirun, whose variables count."""

    name = "collectiverun"
    needs = ("COLLECTIVE_RANK", "COLLECTIVE_SIZE")

    def rank(self) -> int:
        """``COLLECTIVE_RANK``."""
        return self.number("COLLECTIVE_RANK")

    def size(self) -> int:
        """``COLLECTIVE_SIZE``."""
        return self.number("COLLECTIVE_SIZE")

    def local_rank(self) -> int:
        """``COLLECTIVE_LOCAL_RANK``."""
        return self.number("COLLECTIVE_LOCAL_RANK", super().local_rank())

    def local_size(self) -> int:
        """``COLLECTIVE_LOCAL_SIZE``."""
        return self.number("COLLECTIVE_LOCAL_SIZE", self.size())

    def environment(self) -> Environment:
        """All ranks and sizes; ``COLLECTIVE_JOINS`` marks a process that joins later."""
        return dataclasses.replace(
            super().environment(), joining=JOINS in self.variables
        )
