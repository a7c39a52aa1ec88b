"""A dump of the flight recorder: which rank waits, where, since when, for whom."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from collective.errors import UsageError, printable
from collective.recorder.memory import Entry, Rank

_SHOWN = 16  # of each rank's entries, and of ranks on stderr; the file has all
_MARK = '{"collective flight recorder": 2, '
_EVERYONE = 2  # communicators before this include all ranks (native/core.h)
# Paths of libraries: the line shown for a rank is the innermost of the user's own.
_LIBRARIES = (
    "site-packages",
    "dist-packages",
    f"{os.sep}lib{os.sep}python",
    "<frozen",
    f"{Path(__file__).parents[1]}{os.sep}",
)


@dataclass
class Dump:
    """The operations of the ranks of one host, or of several."""

    reason: str  # why it was written, in a sentence
    at: float  # when, in seconds since the epoch
    size: int  # ranks of the whole job
    ranks: Sequence[Rank]  # the ranks described, ascending

    def summary(self) -> str:
        """Return a line for each rank, for stderr."""
        first = self.reason.strip().splitlines()[0]
        lines = [f"collective: {first}"]
        # Of many ranks, the first that do not wait.
        ranks = sorted(self.ranks, key=lambda r: self._doing(r).startswith("waits"))
        shown = self.ranks if len(ranks) <= _SHOWN else ranks[:_SHOWN]
        for rank in shown:
            line = user_line(rank.stack)
            where = f", at {line}{self._age(rank)}" if line else ""
            lines.append(f"  {rank.name} {self._doing(rank)}{where}")
        if len(shown) < len(ranks):
            lines.append(f"  and {len(ranks) - len(shown)} more ranks, in the file")
        lines += self._absent()
        return printable("\n".join(lines))

    def text(self) -> str:
        """Return the file's content: text, and a last line of JSON for ``parse_dump``."""
        hosts = ", ".join(dict.fromkeys(rank.host for rank in self.ranks))
        when = datetime.fromtimestamp(self.at).astimezone().isoformat(" ", "seconds")
        lines = [
            "Flight recorder",
            f"{when}, {len(self.ranks)} of {self.size} ranks, on {hosts}",
            "",
            self.reason.strip(),
            "",
            "Who waits, in what, since when",
            "",
        ]
        for rank in self.ranks:
            lines.append(f"{rank.name}: process {rank.pid} on {rank.host}")
            lines.append(f"  {self._doing(rank)}")
            lines += [f"  in {what}" for what in _within(rank)]
            if rank.stack:
                lines.append(f"  main thread{self._age(rank)}:")
                lines += [f"    {line}" for line in rank.stack]
            lines.append("")
        lines += self._absent()
        lines += ["", "What each rank did last, in seconds before the incident", ""]
        for rank in self.ranks:
            lines.append(rank.name)
            lines.append(
                f"  {'number':>8} {'announced':>11} {'started':>11} {'ended':>11} "
                f"{'step':>8}"
            )
            lines += [_row(entry) for entry in rank.entries[-_SHOWN:]]
            lines.append("")
        data = json.dumps(dataclasses.asdict(self))
        return printable("\n".join(lines)) + _MARK + data[1:] + "\n"

    def _age(self, rank: Rank) -> str:
        old = rank.sampled is None or rank.sampled > -0.05
        return "" if old else f" ({-(rank.sampled or 0):.1f} s before)"

    def _doing(self, rank: Rank) -> str:
        opened = [e for e in rank.entries if e.collective and e.ended is None]
        running = [e for e in opened if e.started is not None]
        state = {
            "dead": "is dead; it was ",
            "stopped": "is stopped; it is ",
            "left": "has left the job; it was ",
        }.get(rank.state, "")
        if running:
            last = running[-1]
            waits = "waits in" if rank.state == "alive" else "in"
            text = f"{waits} {last}{_since(last.started)}{self._missing(rank, last)}"
        elif opened:
            asked = "asking for" if state else "has asked for"
            text = f"{asked} {opened[-1]}{_since(opened[-1].announced)}"
        else:
            text = "in no collective" if state else "is in no collective"
        ended = [e for e in rank.entries if e.collective and e.ended is not None]
        if ended and (not running or state):
            text += (
                f"; its last was {ended[-1]}, ended {-(ended[-1].ended or 0):.1f} s ago"
            )
        elif not rank.entries:
            text += "; it has done none"
        within = _within(rank)
        if within and not running:
            text += f"; in {within[-1]}"
        return state + text

    def _missing(self, waiting: Rank, entry: Entry) -> str:
        """Return which of the described ranks have not reached a collective."""
        if entry.area < 0:
            return ""
        absent, others = [], []
        for rank in self.ranks:
            same = [e for e in rank.entries if e.area == entry.area]
            if rank is waiting or (not same and entry.area >= _EVERYONE):
                continue
            theirs = [e for e in same if e.sequence == entry.sequence]
            if theirs and str(theirs[0]) != str(entry):
                others.append(f"rank {rank.rank} is in {theirs[0]}")
            elif not same or same[-1].sequence < entry.sequence:
                absent.append(str(rank.rank))
        text = f"; for rank {','.join(absent)}" if absent else ""
        return text + "".join(f"; {other}" for other in others[:2])

    def _absent(self) -> list[str]:
        known = {rank.rank for rank in self.ranks}
        unknown = [str(rank) for rank in range(self.size) if rank not in known]
        if not unknown:
            return []
        several = "s" if len(unknown) > 1 else ""
        return [
            f"  nothing here of rank{several} {','.join(unknown)}, on other hosts: each "
            "host writes its own; python -m collective.recorder FILE FILE merges them"
        ]


def parse_dump(text: str, name: str) -> Dump:
    """Read the text that ``Dump.text`` has made; ``name`` is for the error.

    Raises:
        UsageError: If the text is not a dump.
    """
    line = text.rstrip("\n").rpartition("\n")[2]
    try:
        if not line.startswith(_MARK):
            raise ValueError
        data = json.loads("{" + line[len(_MARK) :])
        ranks = [
            Rank(**{**rank, "entries": [Entry(**entry) for entry in rank["entries"]]})
            for rank in data["ranks"]
        ]
        return Dump(data["reason"], data["at"], data["size"], ranks)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f"{name} is not a dump of the flight recorder",
            hint="give the files named after 'flight recorder:' on stderr",
        ) from None


def merge(dumps: Iterable[Dump]) -> Dump:
    """Merge dumps of several hosts into one, at the time of the earliest.

    Times of the other dumps are shifted by the difference of the wall clocks.
    """
    first, *others = sorted(dumps, key=lambda dump: dump.at)
    ranks = {rank.rank: rank for rank in first.ranks}
    for dump in others:
        for rank in dump.ranks:
            if rank.rank not in ranks:
                ranks[rank.rank] = _shifted(rank, dump.at - first.at)
    reasons = dict.fromkeys(a.reason.strip() for a in (first, *others))
    return Dump(
        "\n".join(reasons), first.at, first.size, [ranks[n] for n in sorted(ranks)]
    )


def user_line(stack: Sequence[str]) -> str:
    """Return the innermost line of the user's own code, or else the innermost line."""
    own = (line for line in stack if not any(part in line for part in _LIBRARIES))
    return next(own, stack[0] if stack else "")


def _shifted(rank: Rank, seconds: float) -> Rank:
    def later(moment: float | None) -> float | None:
        return None if moment is None else moment + seconds

    entries = [
        dataclasses.replace(
            entry,
            announced=entry.announced + seconds,
            started=later(entry.started),
            ended=later(entry.ended),
        )
        for entry in rank.entries
    ]
    return dataclasses.replace(
        rank,
        sampled=later(rank.sampled),
        entries=entries,
        since=rank.since + seconds,
    )


def _within(rank: Rank) -> list[str]:
    """Return the step and the spans that a rank is in; the innermost comes last."""
    opened = [e for e in rank.entries if e.ended is None and not e.collective]
    text = [f"{entry}{_since(entry.started)}" for entry in opened]
    return [f"{rank.at}{_since(rank.since)}", *text] if rank.at else text


def _since(moment: float | None) -> str:
    return "" if moment is None else f" since {-moment:.1f} s"


def _row(entry: Entry) -> str:
    times = (entry.announced, entry.started, entry.ended)
    cells = " ".join(f"{'-' if t is None else format(t, '.6f'):>11}" for t in times)
    place = f" (number {entry.sequence} of communicator {entry.area})"
    return (
        f"  {entry.number:>8} {cells} {'-' if entry.step is None else entry.step:>8}  "
        f"{entry}"
        + (place if entry.area >= 0 else "")
        + (" FAILED" if entry.failed else "")
    )
