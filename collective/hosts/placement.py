"""Which rank runs where: every launcher starts from this table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from collective.errors import UsageError
from collective.hosts.host import Host


@dataclass(frozen=True)
class Rank:
    """A rank's place.

    Attributes:
        host: Where it runs.
        rank, size: In the job.
        local_rank, local_size: On its host.
        cross_rank, cross_size: Number of its host, and of the hosts, among those that
            have a rank with this ``local_rank``.
    """

    host: Host
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def share(hosts: Sequence[Host], size: int | None) -> list[Host]:
    """The hosts that get ranks, each with its number of ranks as slots.

    Hosts are filled in their order. Hosts without a number of slots share evenly what
    the rest leaves.

    Args:
        hosts: Each once.
        size: Number of ranks; None for all slots.

    Raises:
        UsageError: If there are not enough slots.
    """
    known = sum(host.slots or 0 for host in hosts)
    unknown = [host for host in hosts if host.slots is None]
    size = known + len(unknown) if size is None else size
    left = max(0, size - known)
    counts = {
        id(host): left // len(unknown) + (i < left % len(unknown))
        for i, host in enumerate(unknown)
    }
    shared, placed = [], 0
    for host in hosts:
        slots = host.slots if host.slots is not None else counts[id(host)]
        slots = min(slots, size - placed)
        if slots > (host.max_slots or slots):
            raise UsageError(
                f"{slots} ranks for {host.name}, whose max_slots is {host.max_slots}",
                hint=f"add a host, or raise max_slots of {host.name}",
            )
        placed += slots
        if slots:
            shared.append(replace(host, slots=slots))
    if placed < size:
        raise UsageError(
            f"{size} ranks, but the hosts have {placed} slots",
            hint=f"-np {placed}, or more slots in -H or the hostfile",
        )
    return shared


def place(hosts: Sequence[Host], size: int | None = None) -> list[Rank]:
    """The place of every rank, in order.

    Raises:
        UsageError: If there are not enough slots.
    """
    shared = share(hosts, size)
    total = sum(host.slots or 0 for host in shared)
    having = [
        [number for number, host in enumerate(shared) if (host.slots or 0) > local]
        for local in range(max(host.slots or 0 for host in shared))
    ]
    ranks: list[Rank] = []
    for number, host in enumerate(shared):
        slots = host.slots or 0
        for local in range(slots):
            at_local = having[local]
            ranks.append(
                Rank(
                    host,
                    rank=len(ranks),
                    size=total,
                    local_rank=local,
                    local_size=slots,
                    cross_rank=at_local.index(number),
                    cross_size=len(at_local),
                )
            )
    return ranks
