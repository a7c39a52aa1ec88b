"""Which cores each rank of a host runs on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def neighbours(cores: Sequence[int], topology: Path = _TOPOLOGY) -> list[int]:
    """Cores in such an order that those of one package, and of one core, are together.

    Args:
        cores: Numbers of logical cores.
        topology: Where Linux describes them.
    """

    def where(core: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{core}" / "topology"
        try:
            package, inside = (
                int((folder / name).read_text())
                for name in ("physical_package_id", "core_id")
            )
        except (OSError, ValueError):
            return 0, core, core
        return package, inside, core

    return sorted(cores, key=where)


def share(local_size: int, cores: Sequence[int] | None = None) -> list[list[int]]:
    """The cores of each local rank; an empty list where it should not be bound.

    Ranks are bound where each can have two cores or more. With one core each, the
    threads of TensorFlow and of the rank itself would wait for one another behind
    whatever else runs on that core, so the kernel moves them as it sees fit.

    Args:
        local_size: Ranks on this host.
        cores: Those to share out; by default the ones this process may use.
    """
    mine = neighbours(sorted(os.sched_getaffinity(0)) if cores is None else cores)
    if len(mine) < 2 * local_size or local_size == 1:
        return [[] for _ in range(local_size)]
    ends = [rank * len(mine) // local_size for rank in range(local_size + 1)]
    return [mine[a:b] for a, b in itertools.pairwise(ends)]


def describe(cores: Sequence[int]) -> str:
    """Short form of core numbers: ``0-3,8``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
