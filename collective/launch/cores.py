"""Chooses the cores on which each rank of a host runs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def physical(cores: Iterable[int], topology: Path = _TOPOLOGY) -> list[list[int]]:
    """Return the hardware threads of each core; cores of one package are neighbours.

    Linux calls hardware threads logical cores, and numbers these.
    """

    def where(core: int) -> tuple[int, int]:
        folder = topology / f"cpu{core}" / "topology"
        try:
            package = int((folder / "physical_package_id").read_text())
            return package, int((folder / "core_id").read_text())
        except (OSError, ValueError):
            return 0, core

    return [list(c) for _, c in itertools.groupby(sorted(cores, key=where), where)]


def share(
    local_size: int, cores: Sequence[int] | None = None, topology: Path = _TOPOLOGY
) -> list[list[int]]:
    """Return the logical cores of each local rank; an empty list if it is not bound.

    Ranks are bound if each can have a logical core or more. Without binding, the kernel
    sometimes runs threads of two ranks on one core while another is idle, and in
    synchronous training every rank waits for the slowest. Two ranks never get threads of
    one physical core, unless there are more ranks than cores. By default the cores are
    those that this process may use.
    """
    usable = sorted(os.sched_getaffinity(0)) if cores is None else cores
    if len(usable) < local_size or local_size == 1:
        return [[] for _ in range(local_size)]
    pieces = physical(usable, topology)
    if len(pieces) < local_size:
        pieces = [[thread] for piece in pieces for thread in piece]
    ends = [rank * len(pieces) // local_size for rank in range(local_size + 1)]
    parts = (pieces[a:b] for a, b in itertools.pairwise(ends))
    return [[*itertools.chain.from_iterable(part)] for part in parts]


def describe(cores: Sequence[int]) -> str:
    """Return the short form of the numbers of cores or ranks: ``0-3,8``."""
    # Within a run, number minus index is constant.
    places = itertools.groupby(enumerate(sorted(cores)), lambda pair: pair[1] - pair[0])
    runs = [[core for _, core in run] for _, run in places]
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
