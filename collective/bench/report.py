"""Rows of the benchmark: printed, as JSON, and as a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from collective.bench.limits import Limits
from collective.bench.measure import Samples, Subject


@dataclass
class Row:
    """One line; all times are medians in seconds.

    Attributes:
        subject: What was measured.
        ranks: Number of ranks.
        state: ``near``, ``far`` or ``mixed`` cores.
        median_s: The core's time.
        floor_s: Least time of this design on this machine (T1); 0 where there is
            no model.
        shared_floor_s: Least time if the ranks shared their arrays (T0).
        wrong: Elements that were not what they should be.
        peers: Time of each peer.
    """

    subject: Subject
    ranks: int
    state: str
    median_s: float
    floor_s: float
    shared_floor_s: float
    wrong: int
    peers: dict[str, float] = field(default_factory=dict)

    def json(self) -> dict[str, object]:
        """As the issue of the benchmark defines it."""
        return {
            "collective": self.subject.collective,
            "algorithm": self.subject.algorithm,
            "transport": self.subject.transport,
            "ranks": self.ranks,
            "bytes": self.subject.bytes,
            "in_place": self.subject.in_place,
            "offset": self.subject.offset,
            "state": self.state,
            "median_s": self.median_s,
            "floor_s": self.floor_s,
            "shared_floor_s": self.shared_floor_s,
            "wrong": self.wrong,
            "peers": self.peers,
        }


def rows(
    subject: Subject,
    limits: dict[str, Limits],
    wrong: int,
    samples: dict[str, Samples],
) -> list[Row]:
    """One row for each state of the machine in which the core was timed."""
    pure = [state for state in samples if state != "mixed" and samples[state].native]
    result = []
    for state in pure or ["mixed"]:
        general = limits.get(state) or next(iter(limits.values()))
        limit = _limits_of(samples[state], general)
        modelled = subject.collective == "allreduce"
        result.append(
            Row(
                subject,
                limit.ranks,
                state,
                statistics.median(samples[state].native),
                limit.private(subject.bytes, subject.in_place) if modelled else 0.0,
                limit.shared(subject.bytes) if modelled else 0.0,
                wrong,
                {
                    peer: statistics.median(times)
                    for peer, times in samples[state].peers.items()
                },
            )
        )
    return result


def _limits_of(samples: Samples, limits: Limits) -> Limits:
    """Those of the same minute, as far as they were measured."""
    if not samples.memory:
        return limits
    read_write, write = map(statistics.median, zip(*samples.memory, strict=True))
    return replace(limits, read_write=read_write, write=write)


def heading(limits: Limits, peers: Sequence[str]) -> str:
    """Limits, and the names of the columns."""
    lines = [
        f"# {limits.ranks} ranks on {limits.cores} cores, {limits.kernels} kernels",
        f"# t1 {limits.latency_s * 1e9:.0f} ns   Brw {limits.read_write / 1e9:.1f} GB/s   "
        f"Bw {limits.write / 1e9:.1f} GB/s   bc {limits.core / 1e9:.1f} GB/s   "
        f"last-level cache {limits.cache >> 20} MB",
        f"# {'bytes':>11} {'place':>5} {'offset':>6} {'state':>5} {'time us':>11} {'algbw':>7} "
        f"{'busbw':>7} {'floor us':>10} {'T1/T':>5} {'T0/T':>5} {'wrong':>5}"
        + "".join(f" {f'{peer} us':>12} {'ratio':>6}" for peer in peers),
    ]
    return "\n".join(lines)


def line(row: Row) -> str:
    """One row as text; bandwidths in GB/s, as nccl-tests defines them."""
    size, seconds, ranks = row.subject.bytes, row.median_s, row.ranks
    factor = {"allreduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
    bus = factor.get(row.subject.collective, (ranks - 1) / ranks)
    text = (
        f"{size:>13} {'in' if row.subject.in_place else 'out':>5} "
        f"{row.subject.offset:>6} {row.state:>5} "
        f"{seconds * 1e6:>11.2f} {size / seconds / 1e9:>7.2f} "
        f"{bus * size / seconds / 1e9:>7.2f} {row.floor_s * 1e6:>10.2f} "
        f"{row.floor_s / seconds:>5.2f} {row.shared_floor_s / seconds:>5.2f} "
        f"{row.wrong:>5}"
    )
    for time in row.peers.values():
        text += f" {time * 1e6:>12.2f} {time / seconds:>6.2f}"
    return text


def write_json(path: str, limits: dict[str, Limits], rows: Sequence[Row]) -> None:
    """Writes ``{"limits": ..., "rows": [...]}``.

    Args:
        path: The file.
        limits: By state; the first is written as ``limits``, all as
            ``limits_by_state``.
        rows: In the order of the measurement.
    """
    content = {
        "limits": next(iter(limits.values())).json(),
        "limits_by_state": {state: limit.json() for state, limit in limits.items()},
        "rows": [row.json() for row in rows],
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n")
