"""Some of the ranks, for collectives among them only."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from collective import library, session


class ProcessSet:
    """A group of ranks with collectives of its own.

    Every rank of the job makes the same sets in the same order; only members may use
    one. A set lives as long as its job, which may have at most 63 of them. A call on a
    set of a former job is refused.

    Args:
        ranks: Members, different ranks of the job in any order.

    Attributes:
        ranks: The members, ascending.
        number: The core's number of the set, in this process only.
        group: The same number, or -1 if this process is not a member.

    Raises:
        Disagreement: If ranks made different sets.
        UsageError: If a rank is not in the job.
    """

    def __init__(self, ranks: Iterable[int]):
        self.ranks = tuple(sorted(ranks))
        me = session.rank()
        group = ctypes.c_int32(-1)
        array = (ctypes.c_int32 * len(self.ranks))(*self.ranks)
        library.check_code(
            library.load().collective_group(array, len(self.ranks), ctypes.byref(group))
        )
        self._rank = self.ranks.index(me) if me in self.ranks else None
        self.number = group.value
        self.group = self.number if self.included() else -1

    def included(self) -> bool:
        """Return whether this process is a member."""
        return self._rank is not None

    def rank(self) -> int | None:
        """Return this process' number within the set; None if it is not a member."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"ProcessSet({list(self.ranks)})"


def members(process_set: ProcessSet | None) -> tuple[int, int, int]:
    """Return the group's number, this process' number in it (or -1), and its size."""
    if process_set is None:
        return 0, session.rank(), session.size()
    number = process_set.rank()
    return process_set.group, -1 if number is None else number, process_set.size()
