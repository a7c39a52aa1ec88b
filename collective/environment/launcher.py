"""One kind of launcher: the variables that it sets, and how they are read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import ClassVar

from collective.environment.base import RANKS_PER_HOST, Environment
from collective.errors import UsageError
from collective.hosts import slurm


class Launcher:
    """A kind of launcher."""

    name: ClassVar[str]  # as in ``Environment.launcher``
    # Variables that it always sets; rank and size come first.
    needs: ClassVar[tuple[str, ...]]
    local: ClassVar[tuple[str, str]]  # variables of local rank and size
    # Variables of cross rank and size; empty if it sets none.
    across: ClassVar[tuple[str, ...]] = ()

    def __init__(self, variables: Mapping[str, str]):
        self.variables = variables

    def started_us(self) -> bool:
        """Return whether this launcher started the process."""
        return all(name in self.variables for name in self.needs)

    def rank(self) -> int:
        """Return the number of this process in the job."""
        return self.number(self.needs[0])

    def size(self) -> int:
        """Return the number of processes in the job."""
        return self.number(self.needs[1])

    def local_size(self) -> int:
        """Return the number of processes on this host, or of all processes."""
        return self.number(self.local[1], self.size())

    def local_rank(self) -> int:
        """Return the number of this process on its host."""
        return self.number(self.local[0], self.rank() % max(1, self.local_size()))

    def cross(self) -> tuple[int, int]:
        """Return the number of this host and of the hosts; -1 if unknown.

        MPI's launchers do not set it. Our launcher, when it starts one of them, sets
        how many ranks each host has; ranks fill one host after the other. The numbers
        may not fit, for example in a job that a rank of another job starts.
        """
        if self.across:
            known = all(name in self.variables for name in self.across)
            rank, size = map(self.number, self.across) if known else (-1, -1)
            return rank, size
        try:
            counts = slurm.counts(self.variables.get(RANKS_PER_HOST, ""))
        except ValueError:
            return -1, -1
        starts = list(itertools.accumulate(counts, initial=0))
        local, first = self.local_rank(), self.rank() - self.local_rank()
        if starts[-1] != self.size() or first not in starts:
            return -1, -1
        host = starts.index(first)
        return (
            cross_of(counts, host, local)
            if counts[host] == self.local_size()
            else (-1, -1)
        )

    def addresses(self) -> list[str]:
        """Return ``host:port`` for a server of each rank, if known without MPI."""
        return []

    def environment(self) -> Environment:
        """Read ranks and sizes; raise a UsageError if one is not possible."""
        rank, size = self.rank(), self.size()
        local_rank, local_size = self.local_rank(), self.local_size()
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            raise UsageError(
                f"the environment ({self.needs[0]}, ...) has rank {rank} of {size}, and "
                f"{local_rank} of {local_size} on this host, which is impossible",
                hint=f"unset {' '.join(self.needs)}, or start the job by {self.name}",
            )
        return Environment(self.name, rank, size, local_rank, local_size, *self.cross())

    def number(self, name: str, default: int | None = None) -> int:
        """Return a variable's number; raise a UsageError if it is not one."""
        text = self.variables.get(name)
        if not text and default is not None:
            return default
        if not (text and text.isascii() and text.isdigit() and len(text) < 10):
            raise UsageError(
                f"{name}={text and text[:40]!r} in the environment is not a number",
                hint=f"unset {' '.join(self.needs)}, or start the job by {self.name}",
            )
        return int(text)


def cross_of(counts: list[int], host: int, local: int) -> tuple[int, int]:
    """Count the hosts with a rank of this local rank: before this one, and all."""
    return sum(n > local for n in counts[:host]), sum(n > local for n in counts)
