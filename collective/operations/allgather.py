"""All-gather: the arrays of all ranks, one after the other, on every rank."""

from __future__ import annotations

import math

import numpy as np

from collective.operations.call import Call, Handle, contiguous, exchange, single
from collective.operations.kinds import Kind
from collective.process_set import ProcessSet


def allgather(
    array: np.ndarray,
    out: np.ndarray | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> np.ndarray:
    """Concatenate the arrays of all ranks along the first axis.

    Args:
        array: Equal dtype and shape on every rank but for the first axis. A scalar
            counts as one row.
        out: Receives the result; a new array by default.
        name: Shown in errors; must be the same on every rank.
        process_set: The ranks that take part; None for all.

    Returns:
        ``[sum of the first axes, ...]``, in the order of the ranks.

    Raises:
        CollectiveError: As for ``allreduce``.
    """
    return _call(array, out, name, process_set).run()


def allgather_async(
    array: np.ndarray,
    out: np.ndarray | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[np.ndarray]:
    """Start ``allgather``; return a handle to wait for.

    The lengths are exchanged before this returns, so it waits until the other ranks
    make the same call; the data are moved afterwards.
    """
    return _call(array, out, name, process_set).start()


def _call(
    array: np.ndarray,
    out: np.ndarray | None,
    name: str | None,
    process_set: ProcessSet | None,
) -> Call[np.ndarray]:
    source = contiguous(array)
    if source.ndim == 0:
        source = source.reshape(1)
    row = source.shape[1:]
    rows = exchange(
        [source.shape[0]],
        process_set,
        f"{name or ''} (lengths of {source.dtype}[?, {', '.join(map(str, row))}])",
    )
    elements = math.prod(row)
    counts = [int(count) * elements for count in rows[:, 0]]
    shape = (int(rows.sum()), *row)
    return single(Kind.ALL_GATHER, source, out, shape, process_set, name, counts=counts)
