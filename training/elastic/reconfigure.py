"""One change of the ranks of a job, and the repetition of what it interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from collective.backends.base import Backend
from collective.backends.capabilities import Elastic

T = TypeVar("T")


class Reconfigure(Exception):
    """All ranks have agreed to form the job again.

    Args:
        leaving: Ranks that will not take part.
    """

    def __init__(self, leaving: Sequence[int] = ()):
        super().__init__("all ranks form the job again")
        self.leaving = leaving


@dataclass(frozen=True)
class Change:
    """The job has other ranks than before.

    Attributes:
        former: The former number of each rank, by its new one; -1 for one that joined.
        size: The former number of ranks.
        noticed: When it was noticed, in seconds of ``time.perf_counter``.
        left: Former ranks that have left by themselves; all others that are gone died.
    """

    former: Sequence[int]
    size: int
    noticed: float
    left: Sequence[int] = ()

    @property
    def joined(self) -> int:
        """How many ranks are new."""
        return list(self.former).count(-1)

    def print(self, step: int) -> None:
        """Prints who is gone and who joined.

        Args:
            step: The next one.
        """
        died = set(range(self.size)) - set(self.former) - set(self.left)
        parts = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} of "
            f"{self.size} {what}"
            for ranks, what in ((died, "died"), (self.left, "left"))
            if ranks
        ]
        if self.joined:
            parts.append(f"{self.joined} joined")
        ranks = len(self.former)
        print(
            f"collective: {', '.join(parts)}; {ranks} "
            f"rank{'s continue' if ranks > 1 else ' continues'} from step {step} after "
            f"{time.perf_counter() - self.noticed:.2f} s",
            file=sys.stderr,
            flush=True,
        )


def join(backend: Backend) -> Change:
    """Joins the job that runs, with nothing of its state yet."""
    assert isinstance(backend, Elastic)
    former = backend.enter()
    return Change(former, len(former), time.perf_counter())


def repeat_on_change(
    backend: Backend,
    attempt: Callable[[Change | None], T],
    change: Change | None = None,
) -> T:
    """Runs what all ranks do together, again after each change of the ranks.

    Args:
        backend: An elastic one.
        attempt: Called with ``change`` at first, then with each new change.
        change: None at the start of a job.

    Returns:
        What the last attempt returned.
    """
    while True:
        left: Sequence[int] = ()
        try:
            return attempt(change)
        except Reconfigure as agreed:
            left = agreed.leaving
        except Exception as error:
            if not (isinstance(backend, Elastic) and backend.lost(error)):
                raise
        assert isinstance(backend, Elastic)
        noticed, size = time.perf_counter(), backend.size
        change = Change(backend.regroup(), size, noticed, left)
