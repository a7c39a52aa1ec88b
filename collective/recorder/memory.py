"""The content of the recorder's memory, as Python objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from collective import library
from collective.operations.kinds import DTYPES, Kind, Op

# By the numbers that the core uses.
KINDS = (*(kind.name.lower().replace("_", "-") for kind in Kind), "join", "")
_COLLECTIVES = 7  # kinds before this are collectives
_OPS = [op.name.lower() for op in Op]
_DTYPES = list(DTYPES)
STATES = ("alive", "dead", "left")


@dataclass
class Entry:
    """A collective, or another span of a rank."""

    number: int  # number of the entry on this rank, from 1
    kind: str  # such as ``all-reduce``; empty for other spans
    what: str  # its name
    bytes: int  # size of the tensors
    # announced, started, ended: seconds before the dump, negative; None: not yet.
    announced: float
    started: float | None
    ended: float | None
    # area, sequence: the communicator, and the number of the collective in it, equal on
    # all its ranks. ``area`` is -1 for a collective that the core did not run, or ran
    # before the last reconfiguration.
    area: int
    sequence: int
    failed: bool = False  # whether it raised an error
    detail: str = ""  # operation and element type, if known
    step: int | None = None  # training step in which it began; None outside of a step

    @property
    def collective(self) -> bool:
        """Return whether it is a collective."""
        return self.kind in KINDS[:_COLLECTIVES]

    def __str__(self) -> str:
        name = f"'{self.what}'" if self.what and self.collective else self.what
        size = _size(self.bytes) if self.bytes else ""
        return " ".join(part for part in (self.kind, name, self.detail, size) if part)


@dataclass
class Rank:
    """A rank in a dump."""

    # rank, pid: its rank, -1 if it left before a reconfiguration; its process.
    rank: int
    pid: int
    host: str  # host name
    state: str  # ``alive``, ``dead``, ``left`` or ``stopped``
    # Lines of the stack of its main thread, the innermost first.
    stack: list[str] = field(default_factory=list)
    # When the stack was taken: seconds before the dump, negative; None: never.
    sampled: float | None = None
    entries: list[Entry] = field(default_factory=list)  # the oldest first
    # The rank that the launcher gave it, which prefixes its output.
    launch_rank: int | None = None
    joined: bool = False  # whether it has joined a running job
    # Position of its training loop: ``step 17``, ``input of step 17``, or empty.
    at: str = ""
    since: float = 0.0  # when that began: seconds before the dump, negative

    @property
    def name(self) -> str:
        """Return its rank, and the rank that the launcher gave it if that differs."""
        started = "joined" if self.joined else "started"
        if self.launch_rank not in (None, self.rank):
            return f"rank {self.rank} ({started} as {self.launch_rank})"
        return f"rank {self.rank}" + " (joined)" * self.joined


def read_rank(local_rank: int, host: str, now: int) -> Rank:
    """Read the entries and the state of a rank of this host.

    Args:
        now: Time of the dump, in nanoseconds of the monotonic clock.
    """
    raw = library.extension().read_recorder(local_rank)

    def ago(moment: int) -> float | None:
        return round((moment - now) / 1e9, 6) if moment else None

    return Rank(
        raw["rank"],
        raw["pid"],
        host,
        STATES[raw["state"]],
        raw["stack"].decode(errors="replace").splitlines(),
        ago(raw["sampled"]),
        [
            Entry(
                entry["number"],
                _of(KINDS, entry["kind"]),
                entry["name"].decode(errors="replace"),
                entry["bytes"],
                ago(entry["announced"]) or 0.0,
                ago(entry["started"]),
                ago(entry["ended"]),
                entry["area"],
                entry["sequence"],
                bool(entry["failed"]),
                _detail(entry),
                _step(entry["at"]),
            )
            for entry in sorted(raw["entries"], key=lambda entry: entry["number"])
        ],
        raw["launch_rank"],
        bool(raw["joined"]),
        _position(raw["at"]),
        round(raw["since"] - now / 1e9, 6) if raw["at"] else 0.0,
    )


def _step(at: float) -> int | None:
    return int(at - 1) // 2 if at else None


def _position(at: float) -> str:
    return f"{'input of ' * (at % 2 == 1)}step {_step(at)}" if at else ""


def _detail(entry: Mapping[str, Any]) -> str:
    reduces = entry["kind"] in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
    tensors = f"{entry['tensors']} tensors" if entry["tensors"] > 1 else ""
    parts = (reduces and _of(_OPS, entry["op"]), _of(_DTYPES, entry["dtype"]), tensors)
    return " ".join(part for part in parts if part)


def _of(names: Sequence[str], number: int) -> str:
    return names[number] if 0 <= number < len(names) else ""


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
