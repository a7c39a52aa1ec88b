"""Reduce-scatter: the sum over all ranks, and some of its rows on each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from collective.operations.call import Call, Handle, check_splits, contiguous, single
from collective.operations.kinds import Average, Kind, Op, op_number
from collective.process_set import ProcessSet, members


def reducescatter(
    array: np.ndarray,
    op: Op = Average,
    out: np.ndarray | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    splits: Sequence[int] | None = None,
) -> np.ndarray:
    """Reduce an array over all ranks and give each rank some of its rows.

    Args:
        array: ``[rows, ...]``, equal shape and dtype on every rank.
        op: Average, Sum, Min, Max or Product.
        out: Receives this rank's rows; a new array by default.
        name: Shown in errors; must be the same on every rank.
        process_set: The ranks that take part; None for all.
        splits: Rows of each rank, in order, the same list on every rank; by default
            equal numbers, with one row more for the first ranks if needed.

    Returns:
        This rank's rows of the result.

    Raises:
        CollectiveError: As for ``allreduce``.
    """
    return _call(array, op, out, name, process_set, splits).run()


def reducescatter_async(
    array: np.ndarray,
    op: Op = Average,
    out: np.ndarray | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    *,
    splits: Sequence[int] | None = None,
) -> Handle[np.ndarray]:
    """Start ``reducescatter``; return at once a handle to wait for."""
    return _call(array, op, out, name, process_set, splits).start()


def _call(
    array: np.ndarray,
    op: Op,
    out: np.ndarray | None,
    name: str | None,
    process_set: ProcessSet | None,
    splits: Sequence[int] | None,
) -> Call[np.ndarray]:
    source = contiguous(array)
    _, me, size = members(process_set)
    rows = source.shape[0] if source.ndim else 0
    if splits is None:
        splits = [rows // size + (i < rows % size) for i in range(size)]
    check_splits(splits, source.shape, size)
    row = source.shape[1:]
    elements = math.prod(row)
    counts = [count * elements for count in splits]
    numbers = {"op": op_number(op), "counts": counts}
    shape = (splits[max(me, 0)], *row)
    return single(Kind.REDUCE_SCATTER, source, out, shape, process_set, name, **numbers)
