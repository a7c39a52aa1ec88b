"""Our own launcher."""

from __future__ import annotations

import dataclasses

from collective.environment.base import JOINS, Environment
from collective.environment.launcher import Launcher


class CollectiveRun(Launcher):
    """Our own launcher, on one host. Across hosts it starts mpirun."""

    name = "collectiverun"
    needs = ("COLLECTIVE_RANK", "COLLECTIVE_SIZE")
    local = ("COLLECTIVE_LOCAL_RANK", "COLLECTIVE_LOCAL_SIZE")

    def environment(self) -> Environment:
        """``COLLECTIVE_JOINS`` marks a process that joins later."""
        joining = JOINS in self.variables
        return dataclasses.replace(super().environment(), joining=joining)
