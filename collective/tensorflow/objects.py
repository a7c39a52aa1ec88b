"""Python objects: broadcast from one rank, or gathered from all.

Their bytes go through the collectives on NumPy arrays, so no graph and no session is
needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

import collective
from collective import session
from collective.tensorflow.process_sets import ProcessSet, global_process_set, group_of


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every rank the root's object.

    Args:
        obj: The object; what the others pass does not matter.
        root_rank: The root, counted in the whole job.
        session: Not needed.
        name: Shown in errors; must be the same on every rank.
        process_set: The ranks that take part.

    Returns:
        On the root the object itself, elsewhere a copy.

    Raises:
        CollectiveError: If a rank died or called something else.
    """
    del session
    group = group_of(process_set)
    root = _rank() == root_rank
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8) if root else None
    length = np.array([0 if data is None else data.size])
    what = f"{name or 'object'} from {root_rank}"
    length = collective.broadcast(length, root_rank, None, f"length of {what}", group)
    if data is None:
        data = np.empty(int(length[0]), np.uint8)
    data = collective.broadcast(data, root_rank, None, what, group)
    return obj if root else cloudpickle.loads(data.tobytes())


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function of the object that does ``broadcast_object``."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """The objects of all ranks, in their order.

    Args:
        obj: This rank's.
        session: Not needed.
        name: Shown in errors; must be the same on every rank.
        process_set: The ranks that take part.

    Raises:
        CollectiveError: If a rank died or called something else.
    """
    del session
    group, name = group_of(process_set), name or "objects"
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    lengths = collective.allgather(
        np.array([data.size]), None, f"lengths of {name}", group
    )
    everyone = collective.allgather(data, None, name, group)
    pieces = np.split(everyone, np.cumsum(lengths)[:-1])
    # Ranks that have joined give none.
    return [cloudpickle.loads(piece.tobytes()) for piece in pieces if piece.size]


def _rank() -> int:
    return session.rank()
