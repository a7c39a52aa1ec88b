"""Ranks and sizes of a process, and the variables that a launcher and its ranks share."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# The number of ranks on each host, in order, as ``2(x3),1``: set by our launcher.
RANKS_PER_HOST = "COLLECTIVE_RANKS_PER_HOST"
# collectiverun --min-np: the job continues with at least so many ranks. --max-np: it
# never has more.
MIN_NP, MAX_NP = "COLLECTIVE_MIN_NP", "COLLECTIVE_MAX_NP"
RANK_TIMEOUT = "COLLECTIVE_RANK_TIMEOUT"
# Set for a process that joins a running job.
JOINS = "COLLECTIVE_JOINS"
# Set by collectiverun next to ``HOROVOD_RANK`` etc., for scripts to read.
SETS_HOROVOD_RANK = "COLLECTIVE_SETS_HOROVOD_RANK"


@dataclass(frozen=True)
class Environment:
    """Ranks and sizes of this process, as its launcher set them."""

    # ``mpirun``, ``srun``, ``horovodrun``, ``torchrun``, ``collectiverun``, ``PMIx``,
    # ``TF_CONFIG`` or, for a process without a launcher, ``""``.
    launcher: str = ""
    # rank, size: number of this process in the job, and number of processes.
    rank: int = 0
    size: int = 1
    # local_rank, local_size: the same within this host.
    local_rank: int = 0
    local_size: int = 1
    # cross_rank, cross_size: number of this host, and number of hosts, among the hosts
    # that have a process with this ``local_rank``. If the launcher does not set them,
    # they are computed for hosts with equally many processes.
    cross_rank: int = -1
    cross_size: int = -1
    # Whether the job was running before this process started. Until it has joined, the
    # process is a job of its own, and ``rank`` is only its name.
    joining: bool = False

    def __post_init__(self) -> None:
        if self.cross_rank < 0:
            object.__setattr__(self, "cross_rank", self.rank // self.local_size)
        if self.cross_size < 0:
            object.__setattr__(self, "cross_size", -(-self.size // self.local_size))

    @property
    def launched(self) -> bool:
        """Return whether some launcher started this process."""
        return bool(self.launcher)

    @property
    def current(self) -> Environment:
        """Return the present ranks and sizes: one process before it has joined the job."""
        return Environment(self.launcher) if self.joining else self


def place_on(launcher: str, rank: int, hosts: Sequence[Hashable]) -> Environment:
    """Return ranks and sizes of a process, given the host of each rank."""
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    local = here.index(rank)
    across = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local]
    cross = across.index(hosts[rank]), len(across)
    return Environment(launcher, rank, len(hosts), local, len(here), *cross)
