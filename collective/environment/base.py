"""The ranks and sizes of a process, and how a launcher's variables are read."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from collective.errors import UsageError
from collective.hosts import slurm

# How many ranks each host has, in order, as ``2(x3),1``: set by our launcher.
RANKS_PER_HOST = "COLLECTIVE_RANKS_PER_HOST"
# collectiverun --min-np: the job continues while so many ranks are left. --max-np: it
# never has more.
MIN_NP, MAX_NP = "COLLECTIVE_MIN_NP", "COLLECTIVE_MAX_NP"
RANK_TIMEOUT = "COLLECTIVE_RANK_TIMEOUT"


@dataclass(frozen=True)
class Environment:
    """Ranks and sizes of this process, as its launcher set them.

    Attributes:
        launcher: ``mpirun``, ``srun``, ``horovodrun``, ``torchrun``,
            ``collectiverun``, ``PMIx``, ``TF_CONFIG`` or, for a process without a
            launcher, ``""``.
        rank, size: Number of this process in the job, and number of processes.
        local_rank, local_size: The same within this host.
        cross_rank, cross_size: Number of this host, and number of hosts, among those
            that have a process with this ``local_rank``. If the launcher does not set
            them, they are computed for hosts with equally many processes.
        joining: Whether the job was running before this process started. Until it has
            joined, the process is a job of its own, and ``rank`` is only its name.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = -1
    cross_size: int = -1
    joining: bool = False

    def __post_init__(self) -> None:
        if self.cross_rank < 0:
            object.__setattr__(self, "cross_rank", self.rank // self.local_size)
        if self.cross_size < 0:
            object.__setattr__(self, "cross_size", -(-self.size // self.local_size))

    @property
    def launched(self) -> bool:
        """Whether some launcher started this process."""
        return bool(self.launcher)

    @property
    def current(self) -> Environment:
        """The present ranks and sizes: one process, if it has still to join the job."""
        return Environment(self.launcher) if self.joining else self


def place_on(launcher: str, rank: int, hosts: Sequence[Hashable]) -> Environment:
    """Ranks and sizes of a process, given the host of each rank."""
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local = here.index(rank)
    across = [h for h in dict.fromkeys(hosts) if hosts.count(h) > local]
    return Environment(
        launcher,
        rank,
        len(hosts),
        local,
        len(here),
        across.index(hosts[rank]),
        len(across),
    )


class Launcher(ABC):
    """A kind of launcher, and how to read the variables that it sets.

    Args:
        variables: The environment.
    """

    name: ClassVar[str]
    # Variables that it always sets.
    needs: ClassVar[tuple[str, ...]]

    def __init__(self, variables: Mapping[str, str]):
        self.variables = variables

    def started_us(self) -> bool:
        """Whether it started this process."""
        return all(name in self.variables for name in self.needs)

    @abstractmethod
    def rank(self) -> int:
        """Number of this process in the job."""

    @abstractmethod
    def size(self) -> int:
        """Number of processes in the job."""

    def local_size(self) -> int:
        """Processes on this host; all of them if the launcher sets no number."""
        return self.size()

    def local_rank(self) -> int:
        """Number of this process on its host."""
        return self.rank() % max(1, self.local_size())

    def cross(self) -> tuple[int, int]:
        """Number of this host and of the hosts; -1 if unknown.

        MPI's launchers do not set it. Ours, when it starts one of them, sets its table.
        """
        try:
            counts = slurm.counts(self.variables.get(RANKS_PER_HOST, ""))
        except ValueError:
            return -1, -1
        return _cross_place(counts, self)

    def environment(self) -> Environment:
        """All ranks and sizes.

        Raises:
            UsageError: If a variable is not a number, or out of range.
        """
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
        """A variable's number.

        Raises:
            UsageError: If it is not a number.
        """
        text = self.variables.get(name)
        if not text and default is not None:
            return default
        if not (text and text.isascii() and text.isdigit() and len(text) < 10):
            raise UsageError(
                f"{name}={text and text[:40]!r} in the environment is not a number",
                hint=f"unset {' '.join(self.needs)}, or start the job by {self.name}",
            )
        return int(text)


def _cross_place(counts: Sequence[int], launcher: Launcher) -> tuple[int, int]:
    """``cross_rank`` and ``cross_size``, from the number of ranks on each host.

    Ranks fill one host after the other. (-1, -1) if the numbers do not fit this job, as
    in a job that a rank of another job starts.
    """
    rank, local = launcher.rank(), launcher.local_rank()
    starts = list(itertools.accumulate(counts, initial=0))
    if starts[-1] != launcher.size() or rank - local not in starts:
        return -1, -1
    host = starts.index(rank - local)
    if counts[host] != launcher.local_size():
        return -1, -1
    return sum(n > local for n in counts[:host]), sum(n > local for n in counts)
