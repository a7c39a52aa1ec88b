"""One Chrome trace of the work of all ranks over time (``train.py --timeline FILE``).

Each rank has a row. A step in it has the spans ``input``, ``forward/backward``,
``all-reduce`` and ``update``. If the backend records buckets, they are shown inside of
``all-reduce``; or in a line of their own, if they leave before the end of the backward pass.
The ranks of rank 0's host write ``FILE`` while they train. Ranks of any other host write
``FILE.<host>`` there, and at the end these files are added to ``FILE``. All times are
rank 0's. A rank that joins a running job gets a row of its own, and a rank whose number
changes keeps its row.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import Collective, Recording
from collective.training.loop.observer import FinishedStep, Observer
from collective.training.loop.position import Position
from collective.training.observers import clocks
from collective.training.observers.trace_file import Event, TraceFile
from collective.training.process.object_collectives import gather, gather_few, total
from collective.training.steps.report import REDUCE_START, REDUCE_STOP

# The largest size of a trace: about 130,000 steps, counted over all ranks.
LIMIT_BYTES = 64 << 20
# At most the events of so many seconds are lost when a rank is killed.
FLUSH_SECONDS = 0.2
CHUNK = 1 << 18  # bytes that are sent at a time, when files are merged
BATCH = 1000  # events that are then written at a time
BUCKETS = 1  # the line of buckets that leave early


class _Step(NamedTuple):
    """A step that is not written yet; seconds by this process' clock."""

    number: int
    begin: float
    ready: float
    done: float
    report: tf.Tensor


def begin(path: str, backend: Backend) -> Timeline:
    """Begin a new trace; every process calls it. Raise a UsageError if it is not writable."""
    hosts = gather(backend, clocks.number_of(_host()))
    if _first_here(backend, hosts):
        name = _part(path, home=hosts[backend.rank] == hosts[0])
        TraceFile(name, 0, create=True).close()
    offset = clocks.measure(backend)  # also: the file is there now
    zero = gather(backend, clocks.now())[0]
    return Timeline(path, backend, hosts, hosts[0], offset, zero)


def together(mine: Timeline | None, path: str, backend: Backend, step: int) -> Timeline:
    """Begin one trace of all ranks, or have ranks without a row join it.

    Every process calls it, at the start and when ranks have joined or left.

    Args:
        mine: This process' timeline, if it has one.
        step: The step to continue with.

    Raises:
        UsageError: If the file cannot be written.
    """
    known = (False, 0.0, 0.0) if mine is None else (True, mine.zero, mine.home)
    machine, host = clocks.number_of(clocks.machine()), clocks.number_of(_host())
    gathered = gather_few(backend, [*known, machine, host])
    there, zeros, homes, machines, hosts = gathered.T
    if not there[0]:
        return begin(path, backend)
    offset = clocks.Offset(0.0, 0.0, clocks.now())
    if not there.all() and np.any(machines != machines[0]):
        offset = clocks.measure(backend)
    if mine is None:
        return Timeline(path, backend, hosts, homes[0], offset, zeros[0], step)
    mine.place(hosts)
    return mine


class Timeline:
    """Records this process' steps.

    Args:
        hosts: By rank, a number for its host.
        home: The name of the host that has the trace.
        offset: This process' clock less rank 0's.
        zero: When the trace begins, by rank 0's clock.
        joined_at: The step before which this process joined a running job.

    Raises:
        UsageError: If the file cannot be written.
    """

    def __init__(
        self,
        path: str,
        backend: Backend,
        hosts: np.ndarray,
        home: float,
        offset: clocks.Offset,
        zero: float,
        joined_at: int | None = None,
    ):
        self.backend = backend
        # Its row, also when its rank changes. A joining rank may get the number of a rank
        # that is gone, so its row has the number that the launcher gave.
        self.row = backend.rank if joined_at is None else backend.called
        self.home, self.offset = home, offset
        self.zero = zero + offset.seconds  # by this process' clock
        self.place(hosts)
        here = hosts[backend.rank]
        limit = LIMIT_BYTES * int(np.count_nonzero(hosts == here)) // backend.size
        self.file = TraceFile(_part(path, here == home), limit, create=False)
        self.flushed = clocks.now()
        self.ended = self.closed = False
        self._steps: list[_Step] = []
        self._others: list[Event] = []
        self._record(True)
        self.file.add(self._header(joined_at))

    def place(self, hosts: np.ndarray) -> None:
        """Note the places of the ranks; ``hosts`` has a number for each rank's host."""
        remote = hosts[self.backend.rank] != hosts[0]
        self.sends = remote and _first_here(self.backend, hosts)
        self.hosts = len(set(hosts))

    def step(
        self, number: int, begin: float, ready: float, done: float, report: tf.Tensor
    ) -> None:
        """Record a step, whose times are seconds of ``time.perf_counter``.

        Args:
            begin: The time when it began to wait for its input.
            ready: The time when it had its input.
            done: The time when it had ended.
            report: The report of the step (see ``collective.training.steps.report``).
        """
        if self.file.full:
            return
        self._steps.append(_Step(number, begin, ready, done, report))
        if done - self.flushed > FLUSH_SECONDS:
            self.flush()

    def span(self, name: str, begin: float) -> None:
        """Record a span between two steps, from ``begin`` (``clocks.now``) until now."""
        self._others.append(self._span(name, begin, clocks.now()))

    def event(self, name: str) -> None:
        """Mark this moment in this process' row."""
        self._others.append(
            {"name": name, "ph": "i", "s": "p", "pid": self.row, "tid": 0,
             "ts": self._microseconds(clocks.now())}
        )  # fmt: skip

    def flush(self) -> None:
        """Write everything that has ended."""
        backend = self.backend
        recorded = backend.recorded() if isinstance(backend, Recording) else []
        since = _since_wall_clock()
        events = self._others
        for step in self._steps:
            inside = [c for c in recorded if step.ready <= c.begin <= step.done]
            events += self._of_step(step, inside, since)
        self._steps, self._others = [], []
        self.file.add(events)
        if self.file.full:
            self._record(False)
        self.flushed = clocks.now()

    def _record(self, on: bool) -> None:
        if isinstance(self.backend, Recording):
            self.backend.record(on)

    def _of_step(
        self, step: _Step, collectives: Sequence[Collective], since: float
    ) -> list[Event]:
        """Return the spans of a step; a span inside another one stays within its bounds."""
        report = step.report.numpy()
        start = float(report[REDUCE_START]) + since
        stop = float(report[REDUCE_STOP]) + since
        # Two clocks were read: a microsecond must not let a bucket out of its span.
        if not self.backend.overlaps:
            start = min([start, *(c.begin for c in collectives)])
        stop = max([stop, *(c.end for c in collectives)])
        start = min(max(start, step.ready), step.done)
        stop = min(max(stop, start), step.done)
        events = [
            self._span("step", step.begin, step.done, number=step.number),
            self._span("input", step.begin, step.ready),
            self._span("forward/backward", step.ready, start),
            self._span("all-reduce", start, stop),
        ]
        for i, c in enumerate(collectives):
            name = f"all-reduce of bucket {i}"
            bucket = self._span(name, c.begin, c.end, bytes=c.bytes)
            events.append(bucket | {"tid": BUCKETS if self.backend.overlaps else 0})
        return [*events, self._span("update", stop, step.done)]

    def _span(self, name: str, begin: float, end: float, **more: Any) -> Event:
        # Both ends are rounded, not the length, so that adjacent spans do not overlap.
        first, last = self._microseconds(begin), self._microseconds(end)
        event = {"name": name, "ph": "X", "ts": first, "dur": round(last - first, 3)}
        event |= {"pid": self.row, "tid": 0}
        return event | ({"args": more} if more else {})

    def _microseconds(self, seconds: float) -> float:
        """Return a time of this process' clock in the unit of the trace."""
        return round(1e6 * (seconds - self.zero), 3)

    def _header(self, joined_at: int | None) -> list[Event]:
        backend, number = self.backend, self.row
        replicas = len(backend.local_replicas)
        name = f"rank {number} on {socket.gethostname()}: {backend.name}"
        name += f", {replicas} replicas" if replicas > 1 else ""
        name += "" if joined_at is None else f", joined at step {joined_at}"
        row = {"pid": number, "tid": 0}
        clock = {
            "offset_seconds": self.offset.seconds,
            "error_seconds": self.offset.error,
        }
        buckets = {"name": "thread_name", "ph": "M", "pid": number, "tid": BUCKETS}
        lines = [buckets | {"args": {"name": "buckets"}}] * backend.overlaps
        return [
            *lines,
            {"name": "process_name", "ph": "M", **row, "args": {"name": name}},
            {"name": "process_sort_index", "ph": "M", **row, "args": {"sort_index": number}},
            {"name": "thread_name", "ph": "M", **row, "args": {"name": "steps"}},
            {"name": "recording begins", "ph": "i", "s": "p", **row, "args": clock,
             "ts": self._microseconds(clocks.now())},
        ]  # fmt: skip

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Merge the hosts' files after a training that went well."""
        if kind is None:
            self.end()
        self.close()

    def end(self) -> None:
        """Write the rest, and merge the hosts' files. Every process calls it."""
        self.flush()
        self._record(False)
        if self.hosts > 1 and not self.ended:
            self._merge()
        self.ended = True

    def close(self) -> None:
        """Write as much as possible. It may be called twice."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(Exception):
            self.flush()
        self._record(False)
        self.file.close()

    def _merge(self) -> None:
        """Add other hosts' files to rank 0's file, and remove them.

        Clocks may have drifted, so times are moved in proportion by the change of the offset
        since the beginning.
        """
        later = clocks.measure(self.backend)  # also: everyone has written everything
        before = self.zero - gather(self.backend, self.zero)[0]
        text = b""
        if self.sends:
            drift = (later.seconds - before) / (later.at - self.offset.at)
            events = [_scaled(event, 1 - drift) for event in self.file.read()]
            text = json.dumps(events).encode()
        lengths = gather(self.backend, len(text))
        share = total(self.backend)
        for sender in np.flatnonzero(lengths):
            received = b""
            for start in range(0, int(lengths[sender]), CHUNK):
                part = (
                    text[start : start + CHUNK] if sender == self.backend.rank else b""
                )
                words = np.frombuffer(part.ljust(CHUNK, b"\0"), np.uint32)
                received += share(words).astype(np.uint32).tobytes()
            if self.backend.rank == 0:
                self._add(json.loads(received.rstrip(b"\0")))
        if self.sends:
            os.remove(self.file.path)

    def _add(self, events: Sequence[Event]) -> None:
        """Add another host's events to the whole file."""
        whole = TraceFile(self.file.path, LIMIT_BYTES, create=False)
        for first in range(0, len(events), BATCH):
            whole.add(events[first : first + BATCH])
        whole.close()


class TimelineObserver(Observer):
    """Writes the timeline while the training runs."""

    def __init__(self, path: str, position: Position):
        self.path = path
        self.position = position
        self.timeline: Timeline | None = None
        self._validation_began = 0.0

    def begin(self) -> None:
        """Begin the trace."""
        self._join()

    def reconfigured(self, root: int) -> None:
        """Give a row to ranks that have just joined; each rank notes its new number."""
        timeline, backend = self._join(), self.position.backend
        timeline.event(f"continues as rank {backend.rank} of {backend.size}")

    def _join(self) -> Timeline:
        backend, step = self.position.backend, self.position.step
        self.timeline = together(self.timeline, self.path, backend, step)
        return self.timeline

    def after_step(self, step: FinishedStep) -> None:
        """Record the step."""
        if self.timeline is not None:
            self.timeline.step(
                step.number, step.begin, step.ready, step.done, step.report
            )

    def before_validation(self) -> None:
        """Note when the validation begins."""
        self._validation_began = clocks.now()

    def after_validation(self, logs: dict[str, float]) -> None:
        """Record the validation, which has ended."""
        if self.timeline is not None:
            self.timeline.span("validation", self._validation_began)

    def end(self) -> None:
        """Merge the files of all hosts."""
        if self.timeline is not None:
            self.timeline.end()

    def leaving(self) -> None:
        """Mark the moment."""
        if self.timeline is not None:
            self.timeline.event("leaves the job")

    def close(self) -> None:
        """Write as much as possible."""
        if self.timeline is not None:
            self.timeline.close()


def _part(path: str, home: bool) -> str:
    """Return the file of this process' host; ``home`` is true on the trace's own host."""
    return path if home else f"{path}.{socket.gethostname()}"


def _first_here(backend: Backend, hosts: np.ndarray) -> bool:
    """Return whether this is the first rank of its host."""
    return backend.rank == np.flatnonzero(hosts == hosts[backend.rank])[0]


def _host() -> str:
    # The machine is added, because some clusters give all hosts the same name.
    return socket.gethostname() + clocks.machine()


def _scaled(event: Event, factor: float) -> Event:
    """Return an event with its times multiplied."""
    if "ts" not in event:
        return event
    first = round(event["ts"] * factor, 3)
    last = round((event["ts"] + event.get("dur", 0.0)) * factor, 3)
    length = {"dur": round(last - first, 3)} if "dur" in event else {}
    return event | {"ts": first} | length


def _since_wall_clock() -> float:
    """Return the monotonic clock minus the wall clock, from which TensorFlow takes times."""
    reads = [(clocks.now(), time.time(), clocks.now()) for _ in range(3)]
    before, wall, after = min(reads, key=lambda read: read[2] - read[0])
    return (before + after) / 2 - wall
