"""Seconds of an all-reduce on a cluster, from the core's simulation.

The core runs its algorithms as they are and records what each rank sends and awaits; a
discrete-event model of links and message costs then gives the time
(``collective/native/simulation``).
"""

from __future__ import annotations

import bisect
import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from collective import library
from collective.operations.kinds import algorithm_number

# Between these, times are interpolated; beyond the last, extrapolated: from a chunk of
# the core on, all chunks are alike.
SIZES = tuple(4 * 4**i for i in range(12))  # 4 B to 16 MiB
# The core's limit for `halving-doubling`, at which `auto` changes.
CHANGE = 64 << 10


@dataclass(frozen=True)
class Wire:
    """What a message costs.

    The defaults are assumptions about a server of today, not measurements.

    Attributes:
        bytes_per_second: Of a host's link, in each direction.
        latency: Seconds one way between hosts.
        per_message: Seconds of a core at each end of a message.
        per_byte: Seconds of a core at each end for each byte, to copy and to sum.
    """

    bytes_per_second: float
    latency: float = 5e-6
    per_message: float = 1e-6
    per_byte: float = 1 / 20e9


@dataclass(frozen=True)
class Cluster:
    """Hosts with equally many ranks, joined by a fat tree without contention."""

    hosts: int
    slots: int
    wire: Wire

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.slots


class _Wire(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_double)
        for name in ("bytes_per_second", "latency", "per_message", "per_byte")
    ]


def simulate(
    hosts: int,
    slots: int,
    wires: Sequence[Wire],
    sizes: Sequence[int],
    algorithm: str = "auto",
    fold: bool = True,
) -> list[list[float]]:
    """Simulates all-reduces of float32.

    Args:
        hosts: At least two.
        slots: Ranks on each.
        wires: The networks to try; recording is done once for all.
        sizes: Bytes on each rank, at least 4.
        algorithm: A name in ``collective.operations.kinds.ALGORITHMS``.
        fold: Hosts that do the same are simulated once. The time is the same.

    Returns:
        Seconds, by size and then by wire.

    Raises:
        UsageError: If the layout cannot be simulated.
    """
    rows = (_Wire * len(wires))()
    for row, wire in zip(rows, wires, strict=True):
        row.bytes_per_second, row.latency = wire.bytes_per_second, wire.latency
        row.per_message, row.per_byte = wire.per_message, wire.per_byte
    wanted = (ctypes.c_int64 * len(sizes))(*sizes)
    seconds = (ctypes.c_double * (len(sizes) * len(wires)))()
    number = algorithm_number(algorithm)
    code = library.load().collective_simulate(
        *(hosts, slots, number, int(fold), wanted, len(sizes), rows, len(wires), seconds)
    )
    library.check(code)
    count = len(wires)
    return [list(seconds[i * count : (i + 1) * count]) for i in range(len(sizes))]


@dataclass(frozen=True)
class Times:
    """Seconds of an all-reduce as a function of its bytes, by straight lines."""

    points: tuple[tuple[int, float], ...]
    per_byte: float = field(init=False)  # beyond the last point

    def __post_init__(self) -> None:
        (low, below), (high, above) = self.points[-2:]
        object.__setattr__(self, "per_byte", (above - below) / (high - low))

    def __call__(self, size: float) -> float:
        """Seconds of an all-reduce of ``size`` bytes."""
        last, seconds = self.points[-1]
        if size >= last:
            return seconds + self.per_byte * (size - last)
        at = max(1, bisect.bisect_left(self.points, (int(size), 0.0)))
        (low, below), (high, above) = self.points[at - 1], self.points[at]
        return below + (above - below) * max(0.0, size - low) / (high - low)


def sizes_for(cluster: Cluster) -> list[int]:
    """Sizes at which to simulate: whole cache lines for each rank, if above 64 KiB."""
    least = 256 * cluster.size
    wanted = {4, 4 << 10, CHANGE}
    large = (-(-size // least) * least for size in (CHANGE * 2, *SIZES) if size > CHANGE)
    return sorted(wanted | set(large) | {-(-(32 << 20) // least) * least})


@functools.lru_cache(maxsize=256)
def times(cluster: Cluster, algorithm: str = "auto") -> Times:
    """Simulates a cluster at several sizes."""
    if cluster.hosts == 1:
        return _on_one_host(cluster)
    sizes = sizes_for(cluster)
    found = simulate(cluster.hosts, cluster.slots, [cluster.wire], sizes, algorithm)
    return Times(tuple((s, row[0]) for s, row in zip(sizes, found, strict=True)))


def _on_one_host(cluster: Cluster) -> Times:
    """Through shared memory, each rank copies its data and sums a share of all."""
    wire, moved = cluster.wire, 2.0 if cluster.slots > 1 else 0.0
    start = 2e-6 if cluster.slots > 1 else 0.0
    return Times(((0, start), (1 << 20, start + moved * wire.per_byte * (1 << 20))))
