"""Broadcast: the root's array, on every rank."""

from __future__ import annotations

import numpy as np

from collective import library
from collective.errors import UsageError
from collective.operations.call import Call, Handle, contiguous, single, start_call
from collective.operations.kinds import Kind
from collective.process_set import ProcessSet

_KIND = int(Kind.BROADCAST)


def broadcast(
    array: np.ndarray,
    root_rank: int = 0,
    out: np.ndarray | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> np.ndarray:
    """Give every rank the root's array.

    Args:
        array: Equal shape and dtype on every rank; its values matter on the root.
        root_rank: The root, counted in the whole job.
        out: Receives the result; it may be ``array`` itself.
        name: Shown in errors; must be the same on every rank.
        process_set: The ranks that take part; None for all.

    Returns:
        The root's values.

    Raises:
        CollectiveError: As for ``allreduce``.
    """
    root = _root(root_rank, process_set)
    plain = library.extension().run(
        _KIND, False, array, out, 0, name, process_set, 0, -1, root, None
    )
    if plain is not None:
        return plain
    return _call(array, root, out, name, process_set).run()


def broadcast_async(
    array: np.ndarray,
    root_rank: int = 0,
    out: np.ndarray | None = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Handle[np.ndarray]:
    """Start ``broadcast``; return at once a handle to wait for."""
    root = _root(root_rank, process_set)
    plain = start_call(
        _KIND, False, array, out, 0, name, process_set, 0, -1, root, None
    )
    if plain is not None:
        return plain
    return _call(array, root, out, name, process_set).start()


def _root(root_rank: int, process_set: ProcessSet | None) -> int:
    if process_set is None:
        return root_rank
    if root_rank not in process_set.ranks:
        raise UsageError(
            f"root rank {root_rank} is not in {process_set!r}",
            hint="the root is counted in the whole job, and must be a member",
        )
    return process_set.ranks.index(root_rank)


def _call(
    array: np.ndarray,
    root: int,
    out: np.ndarray | None,
    name: str | None,
    process_set: ProcessSet | None,
) -> Call[np.ndarray]:
    source = contiguous(array)
    return single(
        Kind.BROADCAST, source, out, source.shape, process_set, name, root=root
    )
