"""Decides how many ranks each host gets: every launcher starts from this list.

Ranks are numbered in the order of the hosts, and fill one host after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from collective.errors import UsageError
from collective.hosts.host import Host

# Limit for one host: more than machines have cores, and four times the native core's limit.
MOST_RANKS = 1000


def slots_of(hosts: Iterable[Host]) -> int:
    """Return the slots of all hosts; a host without a number counts as 0."""
    return sum(host.slots or 0 for host in hosts)


def place(hosts: Sequence[Host], size: int | None = None) -> list[Host]:
    """Return the hosts that get ranks, each with its number of ranks as slots.

    Hosts are filled in their order; without a ``size``, all slots are filled. Hosts
    without a number of slots share the remaining ranks evenly.

    Raises:
        UsageError: If there are not enough slots, or a host would get too many ranks.
    """
    known = slots_of(hosts)
    unknown = sum(host.slots is None for host in hosts)
    size = known + unknown if size is None else size
    each, more = divmod(max(0, size - known), unknown or 1)
    placed: list[Host] = []
    left = size
    for host in hosts:
        slots = host.slots
        if slots is None:
            slots, more = each + (more > 0), more - 1
        slots = min(slots, left)
        if slots > (host.max_slots or slots):
            raise UsageError(
                f"{slots} ranks for {host.name}, whose max_slots is {host.max_slots}",
                hint=f"add a host, or raise max_slots of {host.name}",
            )
        if slots > MOST_RANKS:
            raise UsageError(
                f"{slots} ranks for {host.name}: at most {MOST_RANKS} on one host",
                hint="-np is the number of ranks, about that of the cores",
            )
        left -= slots
        if slots:
            placed.append(replace(host, slots=slots, max_slots=None))
    if left:
        raise UsageError(
            f"{size} ranks, but the hosts have {size - left} slots",
            hint=f"-np {size - left}, or more slots in -H or the hostfile",
        )
    return placed
