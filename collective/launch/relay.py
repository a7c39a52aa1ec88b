"""Shows the output of mpirun as it arrives, and reads from it the state of each rank."""

from __future__ import annotations

import collections
import re
import signal
from dataclasses import dataclass
from typing import IO

from collective.elastic import generations
from collective.launch.output import (
    KEPT_CHARACTERS,
    KEPT_LINES,
    OutputStyle,
    RankOutput,
)

# A rank that waits too long repeats its report within this time.
STILL_WAITS_SECONDS = 10.0
# Messages of collective.launch.rank about the rank that it supervises. They carry a word that
# no other job has, because a rank may print the log of another job.
EARLY = ", before it had joined the job"  # so MPI cannot continue without it
_MESSAGE = (
    r"collective\.launch: rank (\d+) on (\S+)%s "
    rf"(started|ready|trains|handed over|left|waits|answers|ended (?:with exit code|by) (?:\d+|SIG[A-Z]+\d*))({EARLY})?\s*$"
)
_PREFIX = re.compile(r"(\S+ \S+ )?\[\d+\] ")  # of a line; it may follow the time
_RANK_LINE = re.compile(r"\[(\d+)\] (.*)")
# Open MPI's own message about a host that does not answer any more.
_LOST_HOST = re.compile(r"Remote daemon *:.* on node (\S+)")
# The same message if the remote shell to the host ended first. Before any rank has started it
# is not about a lost host: all daemons report back before the first rank is started.
_LOST_SHELL = "A daemon failed to report back after being spawned"
_REMOTE_HOST = re.compile(r"Remote host: +(\S+)")
# Open MPI's own message about a network that two hosts share only by name.
_NO_CONNECTION = re.compile(r"Message: +connect\(\) to (\S+):\d+ failed")
# Signals of a rank that was killed, or crashed. Such a rank is the cause: ranks that were
# connected to it exit with a code of their own, and may be reported earlier.
_KILLED = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank."""

    rank: int
    host: str
    how: str  # with exit code 7, or by SIGKILL

    @property
    def failed(self) -> bool:
        """Return whether the rank failed, and did not end for the next generation."""
        return self.code not in (0, generations.EXIT_CODE)

    @property
    def code(self) -> int:
        """Return the exit code, or 128 + the signal that killed the rank."""
        what = self.how.split()[-1]
        if what.isdigit():
            return int(what)
        real_time = what.removeprefix("SIGRT")
        return 128 + (int(real_time) if real_time.isdigit() else signal.Signals[what])


@dataclass(frozen=True)
class Event:
    """Something that a rank has reported."""

    # waits: too long for others; answers: its supervisor runs; fails: first of all ranks,
    # or early.
    what: str
    rank: int
    early: bool = False  # it had not joined the job


class Relay(RankOutput):
    """Passes the output of mpirun on, and keeps its statements about each rank.

    Args:
        verbose: Whether to show the end of a rank that did not fail, too.
        word: The messages about ranks carry it after the host; it is not shown.
    """

    def __init__(self, verbose: bool = False, word: str = "") -> None:
        super().__init__(0, 1, OutputStyle(prefix=False))
        self._word = word and f" {word}"
        self._message = re.compile(_MESSAGE % re.escape(self._word))
        # Reports of ranks to which the launcher must react, in their order.
        self.events: collections.deque[Event] = collections.deque()
        # The last lines of each rank's stderr.
        self.errors_of_rank: dict[int, collections.deque[str]] = (
            collections.defaultdict(lambda: collections.deque(maxlen=KEPT_LINES))
        )
        self.started: dict[int, str] = {}  # rank: host
        # Ranks that wait for the state of the generation before.
        self.ready: set[int] = set()
        self.training: set[int] = set()  # ranks that may end for the next one
        self.handed_over: set[int] = set()  # ranks that end for it
        self.ends: dict[int, RankEnd] = {}
        self.left: set[int] = set()  # ranks that were asked to end
        self.lost_hosts: list[str] = []
        self.unreachable = ""  # an address to which a rank could not connect
        self._lost_shell = False  # the next host in a line is the lost one
        self._verbose = verbose

    @property
    def failed(self) -> RankEnd | None:
        """Return the rank to blame: the first killed one, else the first failed one."""
        ends = [end for end in self.ends.values() if end.failed]
        killed = [end for end in ends if end.how.endswith(_KILLED)]
        return next(iter([*killed, *ends]), None)

    @property
    def codes(self) -> list[int]:
        """Return the exit codes of the ranks that have ended."""
        return [end.code for end in list(self.ends.values())]

    @property
    def gave_up(self) -> RankEnd | None:
        """Return the first rank that exited by itself, with an error."""
        ends = list(self.ends.values())
        return next((e for e in ends if e.failed and e.how.startswith("with")), None)

    @property
    def lost_ranks(self) -> set[int]:
        """Return the lost ranks, without which an elastic job continues."""
        ends = list(self.ends.items())
        return {rank for rank, end in ends if end.failed} | self.left

    @property
    def unfinished(self) -> list[int]:
        """Return the ranks that have started, and whose end was not reported."""
        return sorted(set(self.started) - set(self.ends) - self.left)

    def _is_shown(self, line: str) -> bool:
        """Return False for a line that only the launcher should read."""
        message = self._message.search(line)
        if message:
            rank, host, what, early = message.groups()
            return self._note(int(rank), host, what, bool(early))
        if not _PREFIX.match(line):
            self._hear(line)
        of_rank = _RANK_LINE.search(line)
        if not of_rank:
            return super()._is_shown(line)
        kept = self.errors_of_rank[int(of_rank[1])]
        kept.append(of_rank[2][:KEPT_CHARACTERS])
        return True

    def _hear(self, line: str) -> None:
        """Note mpirun's own messages about hosts; a rank may print another job's log."""
        if lost := _LOST_HOST.search(line):
            self.lost_hosts.append(lost[1])
        self._lost_shell |= _LOST_SHELL in line and bool(self.started)
        if self._lost_shell and (lost := _REMOTE_HOST.search(line)):
            self.lost_hosts.append(lost[1])
            self._lost_shell = False
        if lost := _NO_CONNECTION.search(line):
            self.unreachable = lost[1]

    def _write(self, target: IO[str], line: str) -> bool:
        return super()._write(target, line.replace(self._word, "", 1))

    def _note(self, rank: int, host: str, what: str, early: bool) -> bool:
        if what == "started":
            self.started[rank] = host
            return False
        of_generation = {
            "ready": self.ready,
            "trains": self.training,
            "handed over": self.handed_over,
        }
        if what in of_generation:
            of_generation[what].add(rank)
            return False
        if what in ("waits", "answers"):
            self.events.append(Event(what, rank))
            return False
        if what == "left":
            self.ends.pop(rank, None)
            self.left.add(rank)
            return self._verbose
        first_failure = self.failed is None
        end = self.ends[rank] = RankEnd(rank, host, what.removeprefix("ended "))
        if end.failed and (first_failure or early):
            self.events.append(Event("fails", rank, early))
        return end.failed or self._verbose
