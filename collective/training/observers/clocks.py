"""The offset of this process' monotonic clock from rank 0's clock.

Processes of one machine share the clock. Between machines it is compared by
all-reduces, which every backend has: no all-reduce ends on any rank before it has begun
on every rank. With the times ``begin, end`` of one all-reduce on rank 0 and on rank r,
the offset (r's clock minus rank 0's) satisfies

    r's begin - 0's end  <=  offset  <=  r's end - 0's begin

Each round narrows these bounds. This is Cristian's method (1989) with all ranks at once;
the bounds give the error.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collective.backends.base import Backend
from collective.training.process.object_collectives import gather, total

ROUNDS = 50


@dataclass(frozen=True)
class Offset:
    """This process' clock minus rank 0's clock."""

    seconds: float  # the offset
    error: float  # bound of the error in seconds when it was measured
    at: float  # time of the measurement, by this process' clock


def now() -> float:
    """Return seconds of the monotonic clock."""
    return time.perf_counter()


def machine() -> str:
    """Return a name of the clock: the boot and the time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/time")
    return (boot.read_text() if boot.exists() else os.uname().nodename) + (
        os.readlink(namespace) if namespace.exists() else ""
    )


def number_of(name: str) -> int:
    """Return a number below 2**48 for a name, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def measure(backend: Backend) -> Offset:
    """Measure the offset; every process calls it.

    If all processes share one clock, only its name is exchanged.
    """
    machines = gather(backend, number_of(machine()))
    if np.all(machines == machines[0]):
        return Offset(0.0, 0.0, now())
    times = _rounds(backend)
    zero = times[0]
    low, high = -np.inf, np.inf
    for other in np.flatnonzero(machines == machines[backend.rank]):
        low = max(low, float(np.max(times[other, 0] - zero[1])))
        high = min(high, float(np.min(times[other, 1] - zero[0])))
    if machines[backend.rank] == machines[0]:
        low = high = 0.0
    return Offset((low + high) / 2, (high - low) / 2, now())


def _rounds(backend: Backend) -> np.ndarray:
    """Return begin and end of ``ROUNDS`` all-reduces per rank: ``[size, 2, ROUNDS]``."""
    barrier = total(backend)
    mine = np.empty((2, ROUNDS))
    for i in range(ROUNDS):
        mine[0, i] = now()
        barrier(np.zeros(()))
        mine[1, i] = now()
    return gather(backend, mine)
