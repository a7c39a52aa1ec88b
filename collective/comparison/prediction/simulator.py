"""Seconds of an all-reduce on a cluster, from the core's simulation.

The core runs its algorithms as they are and records what each rank sends and awaits; a
discrete-event model of links and message costs then gives the time
(``collective/native/simulation``).
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

from collective import library
from collective.operations.kinds import algorithm_number

# Between these, times are interpolated; beyond the last, extrapolated: from a chunk of
# the core on, all chunks are alike.
SMALL, LARGE = (4, 4 << 10, 64 << 10), tuple(m << 18 for m in (1, 4, 16, 64, 128))
# Bytes/s of a host's memory, read and written, assumed: half of what eight channels of
# DDR4-3200 have. The ranks of a host share it.
MEMORY = 100e9


@dataclass(frozen=True)
class Wire:
    """What a message costs.

    The defaults are assumptions about a server of today, not measurements.
    """

    bytes_per_second: float  # of a host's link, in each direction
    latency: float = 5e-6  # seconds one way between hosts
    per_message: float = 1e-6  # seconds of a core at each end of a message
    # Seconds of a core at each end for each byte, to copy and to sum.
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
        *(
            hosts,
            slots,
            number,
            int(fold),
            wanted,
            len(sizes),
            rows,
            len(wires),
            seconds,
        )
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
    return sorted({*SMALL, *(-(-size // least) * least for size in LARGE)})


_known: dict[tuple[Cluster, str], Times] = {}


def times(cluster: Cluster, algorithm: str = "auto") -> Times:
    """All-reduces on a cluster, simulated at several sizes; kept."""
    if (cluster, algorithm) not in _known:
        prepare(cluster.hosts, cluster.slots, [cluster.wire], algorithm)
    return _known[cluster, algorithm]


def prepare(hosts: int, slots: int, wires: Sequence[Wire], algorithm: str) -> None:
    """Simulates several wires at once, which costs little more than one."""
    clusters = [Cluster(hosts, slots, wire) for wire in wires]
    if hosts == 1:
        _known.update({(one, algorithm): _on_one_host(one) for one in clusters})
        return
    sizes = sizes_for(clusters[0])
    found = simulate(hosts, slots, wires, sizes, algorithm)
    through = 2 * slots / MEMORY if slots > 1 and algorithm == "auto" else 0.0
    for i, one in enumerate(clusters):
        points = (
            (s, max(row[i], s * through)) for s, row in zip(sizes, found, strict=True)
        )
        _known[one, algorithm] = Times(tuple(points))


def _on_one_host(cluster: Cluster) -> Times:
    """Every rank's data goes to shared memory and back: the floor T1 of the docs."""
    start, moved = (2e-6, 2 * cluster.slots) if cluster.slots > 1 else (0.0, 0)
    return Times(((0, start), (1 << 20, start + moved * (1 << 20) / MEMORY)))
