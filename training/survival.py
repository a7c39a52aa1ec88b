"""Ranks have died: the others go on together, from the newest state among them.

All of them hold the state after the last step that they have finished, for the update
comes after the all-reduce; some may have finished one step more than others when a
rank dies. The newest state wins, so no step that anybody has finished is made again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from backends.base import Backend
from training.exchange import gather_few
from training.state import State, broadcast

T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """The job has other ranks than before.

    Attributes:
        former: By rank, what number it had.
        size: How many ranks there were.
        noticed: When it was noticed, in seconds of ``time.perf_counter``.
    """

    former: Sequence[int]
    size: int
    noticed: float

    def tell(self, step: int) -> None:
        """Says who is gone, and how it goes on."""
        gone = sorted(set(range(self.size)) - set(self.former))
        who = (
            f"rank {gone[0]}"
            if len(gone) == 1
            else f"ranks {', '.join(map(str, gone))}"
        )
        left = len(self.former)
        print(
            f"collective: {who} of {self.size} died; {left} "
            f"rank{'s go' if left > 1 else ' goes'} on from step {step} after "
            f"{time.perf_counter() - self.noticed:.2f} s",
            file=sys.stderr,
            flush=True,
        )


def going_on(backend: Backend, action: Callable[[Change | None], T]) -> T:
    """Does what all ranks do together; where some die, the others do it again.

    Args:
        backend: Whose ranks.
        action: Called with None, and after a death with what has changed.

    Returns:
        What the action returned.
    """
    change: Change | None = None
    while True:
        try:
            return action(change)
        except Exception as error:
            if not backend.lost(error):
                raise
            noticed, size = time.perf_counter(), backend.size
        change = Change(backend.regroup(), size, noticed)


def newest(mine: State, backend: Backend) -> tuple[State, int]:
    """The newest of all ranks' states, on every rank. Every rank calls it.

    Returns:
        The state, and the rank whose it was: the lowest of those that have it.
    """
    places = gather_few(backend, [mine.epoch, mine.step])
    root = max(range(backend.size), key=lambda rank: (*places[rank], -rank))
    return broadcast(mine, backend, root), root
