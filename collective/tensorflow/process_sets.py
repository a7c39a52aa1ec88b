"""Horovod's process sets: declared first, numbered by ``init`` or ``add_process_set``.

It uses ``collective.ProcessSet``, which exists from its creation and lives as long as
the job. A removed set loses its number; the core's group is kept, and used again when a
set of the same ranks is added.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

import collective
from collective import process_set as core
from collective import session
from collective.operations.kinds import Max


class ProcessSet:
    """Some of the ranks.

    Args:
        ranks_or_comm: Different ranks of the job, in any order; or a communicator of
            mpi4py in a job that mpirun started. Ranks may pass different communicators,
            as ``Split`` makes them.

    Attributes:
        process_set_id: Its number; None before it is added and after it is removed.
        mpi_comm: The communicator that it was made from, if any.
        ranks: Its members in order.

    Raises:
        ValueError: If the argument is neither.
    """

    process_set_id: int | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int]):
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            ranks_or_comm = _ranks_in_the_world(ranks_or_comm)
        ranks = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [None]
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(
                "a ProcessSet is made of ranks\nHINT: as in ProcessSet([0, 2])"
            )
        self.ranks: list[int] = sorted(ranks)
        self.group: core.ProcessSet | None = None

    def size(self) -> int | None:
        """Return the number of members; None while it is not added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process' number within the set; None while it is not added.

        Raises:
            ValueError: If this process is not in it.
        """
        if self.process_set_id is None:
            return None
        if session.rank() not in self.ranks:
            raise ValueError("Process is not part of provided process set.")
        return self.ranks.index(session.rank())

    def included(self) -> bool:
        """Return whether this process is a member.

        Raises:
            ValueError: Before ``init()``.
        """
        check_initialized()
        return session.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


def _ranks_in_the_world(comm: Any) -> list[int]:
    """Return the members of a communicator of mpi4py, as the job counts them."""
    from mpi4py import MPI

    return list(
        MPI.Group.Translate_ranks(comm.Get_group(), None, MPI.COMM_WORLD.Get_group())
    )


class _Everyone(ProcessSet):
    """All ranks of the job, including those that joined later."""

    process_set_id = 0

    def __init__(self) -> None:
        self.group = None

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        """Return the ranks of all processes; empty before the job."""
        return list(range(session.size())) if session.is_initialized() else []


global_process_set = _Everyone()

_added: dict[int, ProcessSet] = {0: global_process_set}
_numbers = itertools.count(1)
# Groups of the core by their ranks; they live as long as the job.
_groups: dict[tuple[int, ...], core.ProcessSet] = {}


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a set usable; every rank of the job adds the same sets in the same order.

    Args:
        process_set: The set, or its ranks.

    Returns:
        The set, with its number.

    Raises:
        ValueError: If there is a set of the same ranks, or before ``init()``.
        CollectiveError: If ranks add different sets, or one is not in the job.
    """
    check_initialized()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    mine = tuple(process_set.ranks)
    if any(tuple(other.ranks) == mine for other in _added.values()):
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    # Every rank makes the sets of all ranks, which differ after a Split.
    for ranks in [mine] if process_set.mpi_comm is None else _of_all_ranks(mine):
        if ranks not in _groups:
            _groups[ranks] = core.ProcessSet(ranks)
        # Not the core's number: ranks outside of the set do not get one.
        number = next(_numbers)
        if ranks == mine:
            process_set.process_set_id = number
    assert process_set.process_set_id is not None
    process_set.group = _groups[mine]
    _added[process_set.process_set_id] = process_set
    return process_set


def _of_all_ranks(mine: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the different sets of the ranks; each rank belongs to its own."""
    first = np.array([mine[0]])
    leaders = np.unique(collective.allgather(first, name="process sets"))
    member = np.zeros((len(leaders), session.size()), np.int32)
    member[np.searchsorted(leaders, mine[0]), list(mine)] = 1
    everyone = collective.allreduce(member, Max, name="members of process sets")
    return [tuple(np.flatnonzero(row).tolist()) for row in everyone]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Make a set unusable; every rank of the job removes the same sets.

    Returns:
        Whether it was removed: not if it is the global set, or was not added.
    """
    number = process_set.process_set_id
    if not number or number not in _added:
        return False
    del _added[number]
    process_set.process_set_id = None
    process_set.group = None
    return True


def check_initialized() -> None:
    """Raise a ValueError if this process has not joined its job."""
    if not session.is_initialized():
        raise ValueError(
            "collective.tensorflow has not been initialized; use hvd.init()."
        )


def by_id(number: int) -> ProcessSet:
    """Return the set with a number; raise a ValueError if there is none."""
    if number not in _added:
        raise ValueError("Process set does not exist or has not been registered.")
    return _added[number]


def group_of(process_set: ProcessSet) -> core.ProcessSet | None:
    """Return the core's group of a set that was added; None for all ranks."""
    number = process_set.process_set_id
    if number is None or _added.get(number) is not process_set:
        raise ValueError(
            f"{process_set} was not added\n"
            "HINT: hvd.add_process_set(...), or hvd.init(process_sets=[...])"
        )
    return process_set.group


def forget_process_sets() -> None:
    """Forget all sets but the global one when the job ends."""
    for process_set in list(_added.values()):
        remove_process_set(process_set)
    _groups.clear()
