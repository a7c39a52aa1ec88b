"""Measures one collective at one size: is it right, and how long does it take?"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

import collective
from collective.bench.limits import probe, state_of
from collective.bench.peers import Timer
from collective.errors import CollectiveError
from collective.operations.call import Call
from collective.operations.kinds import Kind, Op, algorithm_number, transport_number

COLLECTIVES = {
    "allreduce": Kind.ALL_REDUCE,
    "broadcast": Kind.BROADCAST,
    "allgather": Kind.ALL_GATHER,
    "reducescatter": Kind.REDUCE_SCATTER,
    "alltoall": Kind.ALL_TO_ALL,
}
BLOCKS = 6


@dataclass(frozen=True)
class Subject:
    """A collective and the form in which it is measured."""

    collective: str  # a key of COLLECTIVES
    algorithm: str  # of the all-reduce
    transport: str | None  # 16-bit dtype of the all-reduce's slots
    # Bytes as nccl-tests counts them: of the whole array (for all-gather,
    # reduce-scatter and all-to-all, of the shards of all ranks together).
    bytes: int
    in_place: bool  # whether input and output are one (all-reduce and broadcast)
    offset: int = 0  # bytes of each array from the beginning of a page


@dataclass
class Samples:
    """The measurements in one state of the machine: seconds of the slowest rank."""

    native: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # Bytes/s of the memory at the same time: read_write and write of Limits.
    memory: list[tuple[float, float]] = field(default_factory=list)


def _array(count: int, subject: Subject) -> np.ndarray:
    """Return a float32 vector in pages of its own."""
    try:
        memory = mmap.mmap(-1, max(count * 4, 1) + subject.offset + (2 << 20))
    except (OSError, OverflowError) as error:
        raise CollectiveError(
            f"no memory for an array of {4 * count:,} bytes: {error}",
            hint="smaller --sizes",
        ) from None
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.float32, count, subject.offset)


class Bench:
    """A collective with its arrays."""

    def __init__(self, subject: Subject):
        self.subject = subject
        size, rank = collective.size(), collective.rank()
        kind = COLLECTIVES[subject.collective]
        part = max(1, subject.bytes // 4 // size)
        whole = max(1, subject.bytes // 4)
        counts: list[int] = []
        sent = received = whole
        if kind == Kind.ALL_GATHER:
            sent, received, counts = part, part * size, [part] * size
        elif kind == Kind.REDUCE_SCATTER:
            sent, received, counts = part * size, part, [part] * size
        elif kind == Kind.ALL_TO_ALL:
            sent = received = part * size
            counts = [part] * size * size
        self.source = self.target = _array(sent, subject)
        if not subject.in_place:
            self.target = _array(received, subject)
        self.kind, self.part, self.rank, self.size = kind, part, rank, size
        self.call = Call(
            kind,
            [(self.source, self.target)],
            None,
            op=int(Op.Sum),
            algorithm=algorithm_number(subject.algorithm),
            transport=transport_number(subject.transport),
            counts=counts,
        )

    def check(self, timer: Timer | None = None) -> int:
        """Run the collective once, by the core or a peer; leave zeros for the timing.

        Returns:
            The number of wrong elements on all ranks together.
        """
        self.target[...] = -1
        # Small enough to be exact in 8 bits.
        self.source[...] = self._numbers(self.rank, self.source.size)
        (timer or self.time)(self.source, self.target, 1, 1)
        wrong = self._wrong()
        self.source[...] = 0  # sums in place would overflow
        return wrong

    def _wrong(self) -> int:
        ranks = range(self.size)
        if self.kind == Kind.ALL_REDUCE:
            wanted = sum(self._numbers(r, self.source.size) for r in ranks)
        elif self.kind == Kind.BROADCAST:
            wanted = self._numbers(0, self.source.size)
        elif self.kind == Kind.ALL_GATHER:
            wanted = np.concatenate([self._numbers(r, self.part) for r in ranks])
        else:
            mine = slice(self.rank * self.part, (self.rank + 1) * self.part)
            theirs = [self._numbers(r, self.source.size)[mine] for r in ranks]
            summed = self.kind == Kind.REDUCE_SCATTER
            wanted = sum(theirs) if summed else np.concatenate(theirs)
        differ = int(np.count_nonzero(self.target != wanted))
        return int(collective.allreduce(np.array(differ), collective.Sum))

    def time(
        self, source: np.ndarray, target: np.ndarray, repetitions: int, inner: int
    ) -> np.ndarray:
        """Return the seconds of each repetition on this rank."""
        return self.call.time(repetitions, inner)

    @staticmethod
    def _numbers(rank: int, count: int) -> np.ndarray:
        return (np.arange(count) % 7 + rank + 1).astype(np.float32)


def time_subject(
    bench: Bench,
    peers: Mapping[str, Timer],
    seconds: float,
    memory: Callable[[], tuple[float, float]] | None = None,
) -> tuple[int, dict[str, Samples]]:
    """Check and time a collective; peers take turns with the core, block by block.

    Args:
        seconds: About how long the core's turns may take together.
        memory: Measures the memory, in turn with them, because the use of it by other
            machines changes within seconds.

    Returns:
        The number of wrong elements, and samples for each state of the machine.
    """
    timers = {"native": bench.time, **peers}
    wrong = 0
    plan = {}
    for name, timer in timers.items():
        wrong += bench.check(timer)
        once = slowest(timer(bench.source, bench.target, 3, 1)).min()
        inner = int(np.clip(3e-4 / once, 1, 100))
        repetitions = int(np.clip(seconds / BLOCKS / once / inner, 2, 300))
        plan[name] = (repetitions, inner)
    samples: dict[str, Samples] = defaultdict(Samples)
    for _ in range(BLOCKS):
        for name, timer in timers.items():
            before = probe()
            times = slowest(timer(bench.source, bench.target, *plan[name]))
            bucket = samples[state_of(before, probe())]
            target = bucket.native if name == "native" else bucket.peers[name]
            target.extend(times)
        if memory:
            before = probe()
            rates = memory()
            samples[state_of(before, probe())].memory.append(rates)
    return wrong, samples


def slowest(seconds: np.ndarray) -> np.ndarray:
    """Return the time of each repetition on the rank on which it took longest."""
    return collective.allreduce(seconds, collective.Max)
