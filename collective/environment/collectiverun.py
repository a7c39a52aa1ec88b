"""Our own launcher, on one host: ``python -m collective.launch``."""

from __future__ import annotations

import dataclasses

from collective.environment.base import Environment, Launcher

# Of a process that comes to a job that runs.
JOINS = "COLLECTIVE_JOINS"


class CollectiveRun(Launcher):
    """``COLLECTIVE_RANK`` and its kin; across hosts it starts mpirun, which is told."""

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
        """All of it; ``COLLECTIVE_JOINS`` tells of a process that comes later."""
        return dataclasses.replace(super().environment(), joins=JOINS in self.variables)
