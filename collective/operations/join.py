"""Join: a rank without more data takes part in what the others call, until all join."""

from __future__ import annotations

import ctypes

import numpy as np

from collective import library
from collective.operations.allgather import allgather


def join() -> int:
    """Waits until every rank has joined; until then changes no result of the others.

    In their all-reduces this rank has zeros (or what changes no product, minimum or
    maximum), and an average still divides by the number of all ranks. To their
    all-gathers it gives no rows. Only in calls among all ranks: a process set waits for
    its members.

    Returns:
        The rank that joined last; of several between the same two calls, the highest.

    Raises:
        PeerLost: If a rank died or left.
        Timeout: If no other rank has called anything for ``COLLECTIVE_TIMEOUT``.
    """
    served = ctypes.c_int64()
    library.check(library.load().collective_join(ctypes.byref(served)))
    calls = allgather(np.array([served.value]), name="calls since join()")
    (last,) = np.flatnonzero(calls == calls.min())[-1:]
    return int(last)
