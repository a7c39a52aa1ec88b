"""Measures the limits of this machine, and computes the least time that they allow.

The model and its symbols are explained in docs/explanation/algorithms.md.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import collective
from collective import library

NEAR_NANOSECONDS = 120
OUT_OF_CACHE = 64 << 20
IN_CACHE = 256 << 10
TRIES = 5
SLOTS = 2 << 20  # bytes, for each rank and for the result


@dataclass
class MachineLimits:
    """Limits of the host with all ranks at work; rates are bytes/s."""

    ranks: int
    cores: int  # shared by the ranks
    latency_s: float  # one way of a cache line between ranks 0 and 1 (t1)
    read_write: float  # traffic of a = b = a + b out of cache, all cores together (Brw)
    write: float  # non-temporal stores out of cache, all cores together (Bw)
    core: float  # one array of c = a + b in cache, one core (bc)
    cache: int  # bytes of the last level
    kernels: str  # the SIMD kernels in use

    def private(self, size: int, in_place: bool = False) -> float:
        """Return the least seconds of an all-reduce by way of slots (T1)."""
        moved = self.ranks * size
        latency = 2 * self.latency_s
        if self.in_cache(size, in_place):
            return max(latency, moved / self.write)
        return max(latency, 2 * moved / self.read_write, 2 * moved / self.write)

    def shared(self, size: int) -> float:
        """Return the least seconds of an all-reduce of shared buffers (T0)."""
        moved = self.ranks * size
        if moved <= self.cache:
            cores = min(self.ranks, self.cores)
            return max(self.latency_s, moved / (cores * self.core))
        return max(self.latency_s, 2 * moved / self.read_write)

    def in_cache(self, size: int, in_place: bool) -> bool:
        """Return whether the arrays of all ranks fit into the cache, with the slots."""
        arrays = self.ranks * size * (1 if in_place else 2)
        return arrays + (self.ranks + 1) * SLOTS <= self.cache


def probe() -> float:
    """Return the one-way seconds of a cache line between ranks 0 and 1."""
    nanoseconds = ctypes.c_double()
    library.load().collective_probe(ctypes.byref(nanoseconds))
    slowest = collective.allreduce(np.array(nanoseconds.value), collective.Max)
    return float(slowest) * 1e-9


def state_of(before: float, after: float) -> str:
    """Return ``near`` or ``far`` cores, or ``mixed`` if the ranks moved in between."""
    near = [latency * 1e9 < NEAR_NANOSECONDS for latency in (before, after)]
    return "mixed" if near[0] != near[1] else "near" if near[0] else "far"


def calibrate(cores: int) -> MachineLimits:
    """Measure the limits in about half a second; all ranks take part.

    Reports the median of several tries: other programs make one try worse, and if they
    hold up one core, the other ranks seem to have the memory to themselves.
    """

    def rate(kernel: int, size: int) -> np.ndarray:
        tries = sorted((_rates(kernel, size, cores) for _ in range(TRIES)), key=np.sum)
        return tries[TRIES // 2]

    return MachineLimits(
        ranks=collective.size(),
        cores=cores,
        latency_s=probe(),
        read_write=float(rate(0, OUT_OF_CACHE).sum()),
        write=float(rate(1, OUT_OF_CACHE).sum()),
        core=float(rate(2, IN_CACHE).min()),
        cache=_last_level_cache(),
        kernels=library.load().collective_kernels().decode(),
    )


def memory_rates(cores: int) -> tuple[float, float]:
    """Measure ``read_write`` and ``write`` of this moment, in a fifth of a second."""
    read_write, write = (_rates(kernel, OUT_OF_CACHE, cores).sum() for kernel in (0, 1))
    return float(read_write), float(write)


def _rates(kernel: int, size: int, cores: int) -> np.ndarray:
    """Return the bytes/s of each rank that has a core, with all of them at work."""
    mine = ctypes.c_double(0.0)
    collective.barrier()
    if collective.rank() < cores:
        library.load().collective_bandwidth(
            kernel, ctypes.c_int64(size), ctypes.byref(mine)
        )
    rates = collective.allgather(np.array([mine.value]))
    return rates[: min(cores, collective.size())]


def _last_level_cache() -> int:
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]])
    return max(sizes) or 32 << 20


def shared_cores() -> int:
    """Return the number of cores that the ranks of this host may use together."""
    mine = np.zeros(max(os.sched_getaffinity(0)) + 1, np.int64)
    mine[list(os.sched_getaffinity(0))] = 1
    most = int(collective.allreduce(np.array(mine.size), collective.Max))
    everyone = collective.allreduce(np.pad(mine, (0, most - mine.size)), collective.Max)
    return int(everyone.sum())
