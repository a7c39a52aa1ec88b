"""Rows of the benchmark: printed, and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from collective import json_file
from collective.bench.limits import MachineLimits
from collective.bench.measure import Samples, Subject


@dataclass
class Row:
    """One line; all times are medians in seconds."""

    subject: Subject
    ranks: int
    state: str  # near, far or mixed cores
    median_s: float  # the core's time
    floor_s: float  # least of this design on this machine (T1); 0 without a model
    shared_floor_s: float  # least if the ranks shared their arrays (T0)
    wrong: int  # number of wrong elements
    peers: dict[str, float]

    def json(self) -> dict[str, object]:
        """Return the row for ``--json``: one object, in which only peers are nested."""
        fields = asdict(self)
        return fields.pop("subject") | fields


def rows(
    subject: Subject,
    limits: dict[str, MachineLimits],
    wrong: int,
    samples: dict[str, Samples],
) -> list[Row]:
    """Return one row for each state of the machine in which the core was timed."""
    pure = [state for state in samples if state != "mixed" and samples[state].native]
    result = []
    for state in pure or ["mixed"]:
        found = samples[state]
        limit = limits.get(state) or next(iter(limits.values()))
        if found.memory:  # measured in the same minute
            read_write, write = map(statistics.median, zip(*found.memory, strict=True))
            limit = replace(limit, read_write=read_write, write=write)
        floors = 0.0, 0.0
        if subject.collective == "allreduce":
            private = limit.private(subject.bytes, subject.in_place)
            floors = private, limit.shared(subject.bytes)
        time = statistics.median(found.native)
        peers = {peer: statistics.median(each) for peer, each in found.peers.items()}
        result.append(Row(subject, limit.ranks, state, time, *floors, wrong, peers))
    return result


def heading(limits: MachineLimits, peers: Sequence[str]) -> str:
    """Return the limits and the names of the columns, as text."""
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


def row_text(row: Row) -> str:
    """Return one row as text; bandwidths in GB/s, as nccl-tests defines them."""
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


def write_results(
    path: str, limits: dict[str, MachineLimits], rows: Sequence[Row]
) -> None:
    """Write the limits of the first state, the limits by state, and the rows."""
    by_state = {state: asdict(limit) for state, limit in limits.items()}
    content = {
        "limits": next(iter(by_state.values())),
        "limits_by_state": by_state,
        "rows": [row.json() for row in rows],
    }
    json_file.write_json(path, content)
