"""How far this process' clock is from rank 0's.

The clock is the monotonic one, which all processes of a machine share. Between
machines it is compared by all-reduces, which every backend has: none ends on any rank
before it has begun on every rank. With rank 0's times ``begin, end`` of one and rank
r's, the offset (r's clock less rank 0's) is

    r's begin - 0's end  <=  offset  <=  r's end - 0's begin

Each round narrows these bounds. This is Cristian's method (1989), the ping-pong being
one with all ranks at once; and the error has a bound.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collective.backends.base import Backend
from collective.training.exchange import gather, total

ROUNDS = 50


@dataclass(frozen=True)
class Offset:
    """This process' clock less that of rank 0.

    Attributes:
        seconds: The offset.
        error: Seconds that it may be wrong by, at the time it was measured.
        at: When that was, by this process' clock.
    """

    seconds: float
    error: float
    at: float


def now() -> float:
    """Seconds by the monotonic clock."""
    return time.perf_counter()


def machine() -> str:
    """The same for processes that share a clock: the boot, and the time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/time")
    return (boot.read_text() if boot.exists() else os.uname().nodename) + (
        os.readlink(namespace) if namespace.exists() else ""
    )


def number_of(name: str) -> int:
    """A number below 2**48 for a name, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def measure(backend: Backend) -> Offset:
    """Compares the clocks; every process calls it.

    Where all share one, nothing is sent but that.
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
    """Begins and ends of some all-reduces on every rank: ``[size, 2, ROUNDS]``."""
    barrier = total(backend)
    mine = np.empty((2, ROUNDS))
    for i in range(ROUNDS):
        mine[0, i] = now()
        barrier(np.zeros(()))
        mine[1, i] = now()
    return gather(backend, mine)
