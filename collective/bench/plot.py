"""The picture of ``--plot``: time against size, with the floor and the peers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from collective.bench.report import Row

LINES = {"near": "-", "far": "--", "mixed": ":"}


def plot(path: str, rows: Sequence[Row]) -> None:
    """Draws the median times: in place where that was measured.

    Args:
        path: Where to; its ending says in which format.
        rows: Of one collective, in the order of the measurement.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    placed, offset = any(r.subject.in_place for r in rows), rows[0].subject.offset
    rows = [
        r for r in rows if (r.subject.in_place, r.subject.offset) == (placed, offset)
    ]
    states = list(dict.fromkeys(row.state for row in rows))
    peers = list(dict.fromkeys(peer for row in rows for peer in row.peers))
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for state in states:
        mine = [row for row in rows if row.state == state]
        sizes = [row.subject.bytes for row in mine]
        curves: list[tuple[str, list[float], str, str, float | None]] = [
            (peer, [row.peers.get(peer, math.nan) for row in mine], ".", f"C{n}", None)
            for n, peer in enumerate(peers, 1)
        ]
        curves.append(("native", [row.median_s for row in mine], "o", "C0", 2.5))
        if mine[0].floor_s:
            floor = [row.floor_s or math.nan for row in mine]
            curves.append(("floor", floor, ".", "0.6", 1))
        several = len(states) > 1
        suffix, line = (f", {state} cores", LINES[state]) if several else ("", "-")
        for name, times, dot, color, width in curves:
            axes.plot(sizes, times, dot + line, label=name + suffix, color=color,
                      lw=width)  # fmt: skip
    subject, ranks = rows[0].subject, rows[0].ranks
    axes.set_title(
        f"{subject.collective} of float32, {ranks} ranks, "
        f"{'in' if placed else 'out of'} place",
        loc="left",
        fontweight="bold",
    )
    axes.set(xscale="log", yscale="log", xlabel="size", ylabel="time (median)")
    axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(base=16))
    axes.xaxis.set_major_formatter(lambda size, _: _with_unit(size, 1024, BYTES))
    axes.yaxis.set_major_formatter(lambda time, _: _with_unit(time * 1e9, 1000, TIMES))
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    figure.legend(frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=144)
    plt.close(figure)


BYTES = ("B", "KB", "MB", "GB")
TIMES = ("ns", "µs", "ms", "s")


def _with_unit(value: float, step: int, units: Sequence[str]) -> str:
    """``4 KB``, ``100 µs``: in the greatest unit of which there is one."""
    power = 0
    while value >= step and power + 1 < len(units):
        value /= step
        power += 1
    return f"{value:g} {units[power]}"
