"""Ranks come and go: those that are there go on together, from the newest state.

All of them hold the state after the last step that they have finished, for the update
comes after the all-reduce; some may have finished one step more than others when a
rank dies. The newest state wins, so no step that anybody has finished is made again.
Where a rank leaves that was told to, or new ones wait, all know it at the end of the
same step, and meet anew before the next.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import numpy as np

from collective.backends.base import Backend
from collective.backends.capabilities import Elastic
from collective.elastic.preemption import RESTARTS, WAITING, Preemption
from collective.errors import CollectiveError, UsageError
from collective.training.checkpoint.state import State, broadcast
from collective.training.checks import check_same_data
from collective.training.exchange import gather_few
from collective.training.input.source import Source

T = TypeVar("T")
# So long a job with too few ranks waits for more, where it may grow; as Horovod.
PATIENCE_SECONDS = 600.0
LOOK_SECONDS = 0.2


class Regroup(Exception):
    """All ranks have agreed to meet anew.

    Args:
        leaving: Those that will not come.
    """

    def __init__(self, leaving: Sequence[int] = ()):
        super().__init__("all ranks meet anew")
        self.leaving = leaving


@dataclass(frozen=True)
class Change:
    """The job has other ranks than before.

    Attributes:
        former: By rank, what number it had; -1: it was not there.
        size: How many ranks there were.
        noticed: When it was noticed, in seconds of ``time.perf_counter``.
        left: Those of the former ranks that have left.
    """

    former: Sequence[int]
    size: int
    noticed: float
    left: Sequence[int] = ()

    @property
    def came(self) -> int:
        """How many ranks are new."""
        return list(self.former).count(-1)

    def tell(self, step: int) -> None:
        """Says who is gone, how many came, and how it goes on."""
        died = set(range(self.size)) - set(self.former) - set(self.left)
        told = [
            f"rank{'s' * (len(who) > 1)} {', '.join(map(str, sorted(who)))} of "
            f"{self.size} {what}"
            for who, what in ((died, "died"), (self.left, "left"))
            if who
        ]
        if self.came:
            told.append(f"{self.came} joined")
        ranks = len(self.former)
        print(
            f"collective: {', '.join(told)}; {ranks} "
            f"rank{'s go' if ranks > 1 else ' goes'} on from step {step} after "
            f"{time.perf_counter() - self.noticed:.2f} s",
            file=sys.stderr,
            flush=True,
        )


def enter(backend: Backend) -> Change:
    """Comes into the job that runs, with nothing of its state yet."""
    assert isinstance(backend, Elastic)
    former = backend.enter()
    return Change(former, len(former), time.perf_counter())


def going_on(
    backend: Backend,
    action: Callable[[Change | None], T],
    change: Change | None = None,
) -> T:
    """Does what all ranks do together; where some come or go, those there do it again.

    Args:
        backend: Whose ranks.
        action: Called with None, and after a change with it.
        change: What the action is called with first.

    Returns:
        What the action returned.
    """
    while True:
        left: Sequence[int] = ()
        try:
            return action(change)
        except Regroup as agreed:
            left = agreed.leaving
        except Exception as error:
            if not (isinstance(backend, Elastic) and backend.lost(error)):
                raise
        assert isinstance(backend, Elastic)
        noticed, size = time.perf_counter(), backend.size
        change = Change(backend.regroup(), size, noticed, left)


def newest(mine: State, backend: Backend) -> tuple[State, int]:
    """The newest of all ranks' states, on every rank. Every rank calls it.

    Returns:
        The state, and the rank whose it was: the lowest of those that have it.
    """
    places = gather_few(backend, [mine.epoch, mine.step])
    root = max(range(backend.size), key=lambda rank: (*places[rank], -rank))
    return broadcast(mine, backend, root), root


def check_newcomers(backend: Backend, source: Source) -> None:
    """A rank that has just come with other data goes again: nobody else ends."""
    try:
        check_same_data(backend, source)
    except UsageError as error:
        go_again(backend, error)


def go_again(backend: Backend, error: CollectiveError) -> NoReturn:
    """Tells why, and leaves the others."""
    print(f"rank {backend.rank}: error: {error}", file=sys.stderr)
    backend.close()
    raise SystemExit(error.exit_code) from None


def enough(
    backend: Backend,
    change: Change,
    told: Preemption,
    step: int,
    over: bool,
    renew: Callable[[], None],
) -> bool:
    """Tells of a change, and whether enough ranks are left; every rank calls it.

    Args:
        backend: Whose ranks; where the job may grow, they wait until there are enough.
        change: What has changed.
        told: What this process has been told.
        step: From which the training goes on.
        over: Whether no step is left.
        renew: Ends for the job's next round, where it is asked for.

    Raises:
        Regroup: Others have come.
    """
    least, grows = backend.options.min_np or 1, backend.options.max_np is not None
    there = over or backend.size >= least
    if backend.rank == 0 and (there or grows):
        change.tell(step)
    while not there and grows and (come := _others_come(backend, told, least)):
        if not come & RESTARTS:
            raise Regroup
        renew()
    return there


def _others_come(backend: Backend, told: Preemption, least: int) -> int:
    """Waits for others, on every rank: the news of them; 0 if there is none in time."""
    if backend.rank == 0:
        print(
            f"collective: too few to go on: {backend.size}, and --min-np is {least}; "
            f"waiting {PATIENCE_SECONDS:.0f} s for others to join",
            file=sys.stderr,
            flush=True,
        )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        here = told.flags() & (WAITING | RESTARTS)
        in_vain = told.noticed or time.monotonic() > deadline
        come, in_vain = backend.broadcast_array(np.array([here, in_vain]))
        if come or in_vain:
            return int(come)
        time.sleep(LOOK_SECONDS)
