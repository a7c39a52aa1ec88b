"""What mpirun passes on: shown as it comes, and read for how each rank fares."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from collective.elastic import generations
from collective.launch.output import KEPT_LINES, Output, Style, lines

# What collective.launch.rank tells of the rank that it watches.
EARLY = ", before it had met the others"  # then MPI cannot go on without it
_TOLD = re.compile(
    r"collective\.launch: rank (\d+) on (\S+) "
    rf"(started|left|ended (?:with|by) (?:\d+|SIG[A-Z]+\d*))({EARLY})?\s*$"
)
_LINE = re.compile(r"\[(\d+)\] (.*)")
# Open MPI's own word for a host that does not answer any more.
_LOST = re.compile(r"Remote daemon *:.* on node (\S+)")
# How a rank ends that was killed, or broke down. Such a one is the cause: those that
# were connected to it end with a code of their own, and may be heard of before it.
_KILLED = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")


@dataclass(frozen=True)
class End:
    """How a rank ended: on which host, and ``with 7`` or ``by SIGKILL``."""

    rank: int
    host: str
    how: str

    @property
    def failed(self) -> bool:
        """Whether it neither ended well nor for the job's next round."""
        return self.code not in (0, generations.EXIT_CODE)

    @property
    def code(self) -> int:
        """The exit code it stands for: 128 + the signal where one killed it."""
        what = self.how.split()[1]
        if what.isdigit():
            return int(what)
        real_time = what.removeprefix("SIGRT")
        return 128 + (int(real_time) if real_time.isdigit() else signal.Signals[what])


class Relay(Output):
    """Passes mpirun's output on, and keeps the last lines of each rank's stderr.

    Args:
        on_failure: Called when the first rank has failed, and when one has before it
            had met the others: with whether that is so.
        verbose: Whether to show the end of a rank that did not fail, too.
    """

    def __init__(
        self, on_failure: Callable[[bool], None], verbose: bool = False
    ) -> None:
        super().__init__(0, 1, Style(prefix=False))
        self.of_rank: dict[int, list[str]] = {}
        self.started: dict[int, str] = {}  # rank: host
        self.ended: dict[int, End] = {}
        self.left: set[int] = set()  # told to end, and the others go on
        self.lost_hosts: list[str] = []
        self._on_failure = on_failure
        self._verbose = verbose

    @property
    def failed(self) -> End | None:
        """The rank to blame: the first that was killed, else the first that failed."""
        ends = [end for end in self.ended.values() if end.failed]
        killed = [end for end in ends if end.how.endswith(_KILLED)]
        return next(iter([*killed, *ends]), None)

    @property
    def well(self) -> int:
        """How many ranks have ended well."""
        return sum(end.code == 0 for end in self.ended.values())

    @property
    def gave_up(self) -> End | None:
        """The first rank that ended by itself, with an error."""
        ends = self.ended.values()
        return next((e for e in ends if e.failed and e.how.startswith("with")), None)

    @property
    def renewed(self) -> bool:
        """Whether ranks have ended for the job's next round."""
        return any(end.code == generations.EXIT_CODE for end in self.ended.values())

    @property
    def gone(self) -> set[int]:
        """Ranks without which the others go on, where they may."""
        return {rank for rank, end in self.ended.items() if end.failed} | self.left

    @property
    def unfinished(self) -> list[int]:
        """Ranks that have started, and of whose end nobody told."""
        return sorted(set(self.started) - set(self.ended) - self.left)

    def _copy(self, pipe: IO[bytes], target: IO[str], is_error: bool) -> None:
        for line in lines(pipe):
            if is_error and not self._shown(line):
                continue
            with contextlib.suppress(OSError, ValueError):
                target.write(line)
                target.flush()

    def _shown(self, line: str) -> bool:
        """Takes note of a line; False for one that was meant for us only."""
        told = _TOLD.search(line)
        if told:
            return self._told(int(told[1]), told[2], told[3], bool(told[4]))
        if lost := _LOST.search(line):
            self.lost_hosts.append(lost[1])
        said = _LINE.search(line)
        if said:
            kept = self.of_rank.setdefault(int(said[1]), [])
            kept.append(said[2])
            del kept[:-KEPT_LINES]
        else:
            self.last.append(line)
        return True

    def _told(self, rank: int, host: str, what: str, early: bool) -> bool:
        if what == "started":
            self.started[rank] = host
            return False
        if what == "left":
            self.ended.pop(rank, None)
            self.left.add(rank)
            return self._verbose
        first = self.failed is None
        end = self.ended[rank] = End(rank, host, what.removeprefix("ended "))
        if end.failed and (first or early):
            self._on_failure(early)
        return end.failed or self._verbose
