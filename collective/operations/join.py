"""Join: a rank without data takes part in the others' calls, until all join."""

from __future__ import annotations

import ctypes

import numpy as np

from collective import library
from collective.operations.allgather import allgather


def join() -> int:
    """Wait until every rank has joined; until then change no result of the others.

    In the all-reduces of the others this rank contributes zeros (or the identity of the
    product, minimum or maximum), and an average still divides by the number of all
    ranks. In their all-gathers it contributes no rows. This holds for calls among all
    ranks only: a process set waits for its members.

    Returns:
        The rank that joined last; if several joined between the same two calls, the
        highest.

    Raises:
        PeerLost: If a rank died or left.
        Timeout: If no other rank has called anything for ``COLLECTIVE_TIMEOUT``.
    """
    served = ctypes.c_int64()
    library.check_code(library.load().collective_join(ctypes.byref(served)))
    calls = allgather(np.array([served.value]), name="calls since join()")
    (last,) = np.flatnonzero(calls == calls.min())[-1:]
    return int(last)
