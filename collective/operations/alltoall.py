"""All-to-all: every rank sends some rows to every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from collective.errors import UsageError
from collective.operations.call import (
    Call,
    Handle,
    check_splits,
    contiguous,
    exchange,
    output,
)
from collective.operations.kinds import Kind
from collective.process_set import ProcessSet, members


def alltoall(
    array: np.ndarray,
    splits: Sequence[int] | None = None,
    out: np.ndarray | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Send rows to every rank and receive theirs.

    Args:
        array: ``[rows, ...]``; equal dtype and shape on every rank but for rows.
        splits: Rows for each rank, in order; they add up to ``rows``. Equally many by
            default.
        out: Receives the result; not ``array``. A new array by default.
        name: Shown in errors; must be the same on every rank.
        process_set: The ranks that take part; None for all.

    Returns:
        The received rows in the order of the ranks, and how many came from each.

    Raises:
        CollectiveError: As for ``allreduce``.
    """
    return _call(array, splits, out, name, process_set).run()


def alltoall_async(
    array: np.ndarray,
    splits: Sequence[int] | None = None,
    out: np.ndarray | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[tuple[np.ndarray, np.ndarray]]:
    """Start ``alltoall``; return a handle to wait for.

    The splits are exchanged before this returns, so it waits until the other ranks make
    the same call; the data are moved afterwards.
    """
    return _call(array, splits, out, name, process_set).start()


def _call(
    array: np.ndarray,
    splits: Sequence[int] | None,
    out: np.ndarray | None,
    name: str | None,
    process_set: ProcessSet | None,
) -> Call[tuple[np.ndarray, np.ndarray]]:
    source = contiguous(array)
    _, me, size = members(process_set)
    rows = source.shape[0] if source.ndim else 0
    if splits is None:
        splits = [rows // size] * size
    check_splits(splits, source.shape, size)
    row = source.shape[1:]
    matrix = exchange(
        splits,
        process_set,
        f"{name or ''} (splits of {source.dtype}[?, {', '.join(map(str, row))}])",
    )
    received = matrix[:, me].copy()
    target = output(out, (int(received.sum()), *row), source.dtype)
    if np.shares_memory(source, target):
        raise UsageError("all-to-all cannot work in place", hint="pass another out")
    elements = math.prod(row)
    return Call(
        Kind.ALL_TO_ALL,
        [(source, target)],
        (target if out is None else out, received),
        process_set=process_set,
        name=name,
        counts=[int(count) * elements for count in matrix.ravel()],
    )
