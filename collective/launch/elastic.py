"""A job whose ranks come and go: ``--min-np``, ``--max-np``, host discovery.

Ranks that die or leave end nobody. Where the job may grow, new ones are started in
their place, and as many as there are slots; they come into the job by themselves, when
they are ready (``collective.session.enter``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collective.elastic import generations
from collective.elastic.membership_file import JOINED, LEFT, Board
from collective.launch.job import Job, Member
from collective.launch.output import Style, tell

LOOK_SECONDS = 0.1
# So long after a rank was lost its place stays empty; twice as long after each that
# came in vain.
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 64.0


@dataclass(frozen=True)
class Growth:
    """How a job may grow.

    Attributes:
        slots: How many ranks there shall be now.
        most: But no more than so many.
        member: Makes the one to start, of its number and the slot that is free.
    """

    slots: Callable[[], int]
    most: int
    member: Callable[[int, int], Member]


class ElasticJob(Job):
    """The processes of one job on this host, some of which may fail or come later.

    Args:
        members, size, style, verbose: As for ``Job``.
        least: The job has gone well where so many ended well that were in it then.
        board: Where ranks tell that they have joined or left.
        growth: None: no rank comes later.
    """

    def __init__(
        self,
        members: Sequence[Member],
        size: int,
        style: Style,
        verbose: bool,
        least: int,
        board: Board,
        growth: Growth | None,
    ):
        super().__init__(members, size, style, verbose)
        self.least = least
        self.board = board
        self.growth = growth
        self.went_well = 0
        self.started = len(members)
        self.slots = {member.rank: member.rank for member in members}  # by rank
        self.joining: set[int] = set()
        self.dismissed: set[int] = set()
        self.not_before, self.pause = 0.0, PAUSE_SECONDS
        self.renewing = self.renewed = False

    def renew(self) -> None:
        """Has the ranks end for the next round, from whatever thread."""
        self.renewing = True

    def _wait(self) -> None:
        while self.processes:
            self._note_joined()
            # Not any child: the discovery has some of its own.
            for pid in list(self.processes):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self._reap(pid, status)
            self._adjust()
            time.sleep(LOOK_SECONDS)
        if self.ending:
            self.failed = None  # it was ended from without
        elif self.renewed:
            self.failed, self.exit_code = None, generations.EXIT_CODE
        elif self.went_well >= self.least:
            self.failed, self.exit_code = None, 0  # the others went on without it

    def _note_joined(self) -> None:
        for rank in [r for r in self.joining if self.board.told(r) == JOINED]:
            self.joining.remove(rank)
            self.pause = PAUSE_SECONDS

    def _ended(self, rank: int, code: int) -> None:
        self._note_joined()
        del self.slots[rank]
        if self.verbose:
            tell(f"{self._who(rank)} ended with {code}")
        self.renewed |= code == generations.EXIT_CODE
        if self.ending or self.renewed or rank in self.joining & self.dismissed:
            self.joining.discard(rank)
            return
        left = self.board.told(rank) == LEFT
        self.board.note_end(rank)
        if code:
            self._blame(rank, code, f"; {len(self.slots)} ranks are left")
        elif not left:
            self.went_well += 1
        if rank in self.joining:
            self.joining.remove(rank)
            self.pause = min(2 * self.pause, LONGEST_PAUSE_SECONDS)
        elif not left and code >= 0:
            self.growth = None  # the job is over; or it would fail again
        self.not_before = time.monotonic() + self.pause

    def _adjust(self) -> None:
        """Starts who is missing, and has go who is too many."""
        if self.ending:
            return
        if self.renewing:
            self._ask_to_renew()
        if not set(self.slots) - self.joining:
            for rank in self.joining - self.dismissed:
                self._dismiss(rank)  # there is nobody whom it could join
            return
        if self.growth is None:
            return
        wanted = max(self.least, min(self.growth.slots(), self.growth.most))
        for rank in sorted(set(self.slots) - self.dismissed)[wanted:]:
            tell(f"{self._who(rank)} is told to leave: there are {wanted} slots")
            self._dismiss(rank)
        while len(self.slots) < wanted and time.monotonic() >= self.not_before:
            taken = self.slots.values()
            self._begin(next(n for n in range(wanted) if n not in taken))

    def _ask_to_renew(self) -> None:
        self.growth = None
        for rank in self.joining - self.dismissed:
            self._dismiss(rank)
        for rank in set(self.slots) - self.joining:
            if self.board.told(rank) == JOINED:
                self.board.ask_to_renew(rank)

    def _begin(self, slot: int) -> None:
        assert self.growth is not None
        member = self.growth.member(self.started, slot)
        tell(f"{self._who(member.rank)} is started, to join the others")
        self.slots[member.rank] = slot
        self.joining.add(member.rank)
        self.started += 1
        self._start(member, alone=False)
        self.outputs[member.rank].start()

    def _dismiss(self, rank: int) -> None:
        """Has a rank leave; one that is not in the job yet just ends."""
        self.dismissed.add(rank)
        how = signal.SIGKILL if rank in self.joining else signal.SIGTERM
        for pid, (other, _) in self.processes.items():
            if other == rank:
                os.killpg(pid, how)
