"""Draws the figures of the site as SVG: ``python docs/hooks/figures.py``.

Each figure has a light paper of its own, so it can be read on light and dark pages.
``python docs/hooks/figures.py results.json`` draws the comparison of backends, from
what ``compare.py`` has written.
"""

from __future__ import annotations

import html
import json
import math
import re
import statistics
import sys
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "assets"
INK, RULE, PAPER = "#1f2933", "#9aa5b1", "#ffffff"
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#7b8794"
PALE = {
    BLUE: "#dcebf5", ORANGE: "#fdf0d2", GREEN: "#d7efe7", RED: "#fbe3d6",
    GREY: "#eef1f4",
}  # fmt: skip


class Drawing:
    """An SVG picture, put together from a few shapes."""

    def __init__(self, width: float, height: float, title: str):
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            'font-family="system-ui, Helvetica, Arial, sans-serif">'
            f"<title>{html.escape(title)}</title>"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/>'
            "</marker></defs>"
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>'
        )
        self.parts: list[str] = []

    def box(self, x, y, w, h, color=GREY, rx=6, dash=False):
        """A rounded box in the pale form of a colour, with its border."""
        dashed = ' stroke-dasharray="5 4"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{rx}" '
            f'fill="{PALE[color]}" stroke="{color}" stroke-width="1.3"{dashed}/>'
        )

    def bar(self, x, y, w, h, color):
        """A filled bar."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(w, 0.5):.1f}" height="{h:g}" '
            f'rx="2" fill="{color}"/>'
        )

    def text(self, x, y, words, size=13, anchor="start", bold=False, color=INK):
        """A line of text whose baseline begins at (x, y)."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{html.escape(str(words))}</text>'
        )

    def line(self, x1, y1, x2, y2, color=INK, width=1.3, dash=False, tip=False):
        """A line, dashed or with an arrow's tip if asked for."""
        extra = ' stroke-dasharray="4 4"' if dash else ""
        extra += ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{color}" stroke-width="{width}"{extra}/>'
        )

    def save(self, name: str) -> None:
        """Writes the picture into the assets."""
        ASSETS.mkdir(exist_ok=True)
        body = "\n".join(self.parts)
        (ASSETS / name).write_text(f"{self.head}\n{body}\n</svg>\n")


def floors() -> None:
    """The floors, the rooms of each, and the direction of imports."""
    stories = [
        ("train.py   compare.py", "parse options, call one function", GREY, []),
        ("comparison/", "the same training on every backend: equal? how fast?", RED,
         ["runs", "equality", "speed", "tables", "figures", "page"]),
        ("training/", "the step, the input, the loop", BLUE,
         ["fit", "loop", "step", "forward", "losses", "|", "input", "checkpoint",
          "elastic", "ledger", "memory", "parallel", "reporting", "sweep",
          "keras_compat"]),
        ("backends/", "one file or folder per way to sum gradients", ORANGE,
         ["base", "registry", "single", "mpi", "native", "tf_*", "|", "auto",
          "horovod"]),
        ("collective/", "rank and size, collectives, launching", GREEN,
         ["operations", "tensorflow", "keras", "environment", "hosts", "launch",
          "elastic", "recorder", "doctor", "bench", "net"]),
        ("collective/native/", "the C++ core", GREEN,
         ["core", "algorithms", "transport", "membership", "kernels", "recorder",
          "bindings"]),
    ]  # fmt: skip
    width, left = 900, 250
    rows = []
    for _, what, _, rooms in stories:
        lines, x = 1, float(left)
        for room in rooms:
            w = 0 if room == "|" else 18 + 7.3 * len(room)
            if room == "|" or x + w > width - 60:
                lines, x = lines + 1, float(left)
            x += w + 8 if w else 0
        rows.append(max(40 + 15 * len(_wrapped(what, 34)), 20 + 32 * lines))
    d = Drawing(width, sum(rows) + 12 * len(rows) + 40, "Floors and rooms")
    y = 14.0
    for (name, what, color, rooms), height in zip(stories, rows, strict=True):
        d.box(14, y, width - 62, height, color)
        d.text(28, y + 24, name, 15, bold=True)
        for number, part in enumerate(_wrapped(what, 34)):
            d.text(28, y + 42 + 15 * number, part, 11.5, color="#52606d")
        x, top = float(left), y + 12
        for room in rooms:
            w = 0 if room == "|" else 18 + 7.3 * len(room)
            if room == "|" or x + w > width - 60:
                x, top = float(left), top + 32
            if w:
                d.parts.append(
                    f'<rect x="{x:.1f}" y="{top:.1f}" width="{w:.1f}" height="24" rx="4" '
                    f'fill="{PAPER}" stroke="{color}"/>'
                )
                d.text(x + w / 2, top + 16.5, room, 12.5, "middle")
                x += w + 8
        y += height + 12
    d.line(width - 28, 24, width - 28, y - 18, tip=True)
    d.parts.append(
        f'<text transform="translate({width - 12} {y / 2}) rotate(90)" font-size="12" '
        f'fill="{INK}" text-anchor="middle">imports go down only</text>'
    )
    d.text(28, y + 14, "Each floor is one Python package below collective. A white box "
           "is a file or a room.", 12, color="#52606d")  # fmt: skip
    d.save("floors.svg")


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def step() -> None:
    """What three replicas do in a step, along the time."""
    d = Drawing(900, 300, "A training step on three replicas")
    d.text(20, 28, "One step, three replicas, a global batch of 5 rows", 15, bold=True)
    replicas = [
        ("replica 0", "rows 0", 1),
        ("replica 1", "rows 1, 2", 2),
        ("replica 2", "rows 3, 4", 2),
    ]
    for number, (name, rows, amount) in enumerate(replicas):
        y = 56 + 62 * number
        d.text(20, y + 20, name, 13, bold=True)
        d.text(20, y + 37, rows, 11.5, color="#52606d")
        d.box(105, y, 50, 44, GREY)
        d.text(130, y + 27, "input", 12, "middle")
        compute = 70 * amount
        d.box(161, y, compute, 44, BLUE)
        if amount > 1:
            d.text(161 + compute / 2, y + 20, "forward, backward", 12, "middle")
            d.text(
                161 + compute / 2, y + 36, "local sums", 11, "middle", color="#52606d"
            )
        else:
            d.text(161 + compute / 2, y + 20, "forward,", 12, "middle")
            d.text(161 + compute / 2, y + 36, "backward", 12, "middle")
            d.box(161 + compute + 6, y, 134 - compute, 44, GREY, dash=True)
            d.text(
                161 + compute + 6 + (134 - compute) / 2, y + 27, "wait", 12, "middle"
            )
        for at, w, label, below, color in (
            (479, 72, "÷ weight", "once", GREEN),
            (557, 62, "clip", "whole sum", GREEN),
            (625, 120, "decay, update", "Keras' optimizer", GREEN),
            (751, 66, "report", "to the loop", GREY),
        ):
            d.box(at, y, w, 44, color)
            d.text(at + w / 2, y + 20, label, 12.5, "middle")
            d.text(at + w / 2, y + 36, below, 10.5, "middle", color="#52606d")
    d.box(309, 50, 162, 180, ORANGE)
    for number, (words, bold) in enumerate(
        (("all-reduce", True), ("gradients, losses,", False),
         ("weights, metrics,", False), ("moved state:", False),
         ("local sums become", False), ("global sums", False))
    ):  # fmt: skip
        d.text(390, 92 + 22 * number, words, 13.5 if bold else 12.5, "middle", bold)
    d.line(20, 258, 868, 258, tip=True)
    d.text(868, 278, "time", 12, "end")
    d.text(161, 278, "different on each replica", 12, color=BLUE)
    d.text(479, 278, "the same on every replica, to the bit", 12, color=GREEN)
    d.save("step.svg")


def algorithms() -> None:
    """Syncs and bytes of each all-reduce, for 8 ranks; and over two hosts."""
    n = 8
    part, log = 2 * (n - 1) / n, int(math.log2(n))
    local = [
        ("one-shot", 1, n - 1.0, 1.0, "each reads all data of every rank"),
        ("direct", 2, part, 1.0, "each sums its part, and copies the other sums"),
        ("ring", 2 * (n - 1), part, part, "parts travel around, summed at each hop"),
        ("halving-doubling", 2 * log, part, part, "halves exchanged with partners"),
        ("tree", 2 * log, float(log), 1.0, "sums go up to the root, and down again"),
    ]
    d = Drawing(900, 520, "All-reduce algorithms: steps and bytes")
    d.text(20, 30, f"On one host, {n} ranks, S bytes on each", 15, bold=True)
    for x, label in ((160, "synchronizations"), (400, "shared memory read, per rank"),
                     (640, "shared memory written, per rank")):  # fmt: skip
        d.text(x, 56, label, 12, color="#52606d")
    for number, (name, syncs, loads, stores, how) in enumerate(local):
        y = 72 + 46 * number
        d.text(20, y + 16, name, 13.5, bold=True)
        chunked = " a chunk" if name == "direct" else ""
        d.bar(160, y + 3, syncs * 11, 18, GREY)
        d.text(166 + syncs * 11, y + 17, f"{syncs}{chunked}", 12)
        d.bar(400, y + 3, loads * 24, 18, BLUE)
        d.text(406 + loads * 24, y + 17, f"{loads:g} S", 12)
        d.bar(640, y + 3, stores * 24, 18, ORANGE)
        d.text(646 + stores * 24, y + 17, f"{stores:g} S", 12)
        d.text(20, y + 33, how, 11, color="#52606d")
    hosts, per = 2, 4
    d.text(20, 336, f"Between {hosts} hosts of {per} ranks: bytes that a host sends",
           15, bold=True)  # fmt: skip
    least = 2 * (hosts - 1) / hosts
    # direct: each rank sends 2(n-1)/n S; of its n-1 peers, n-per are on the other host.
    sent = [
        ("hierarchical", least, "sum on the host first; every rank sends its lane"),
        ("ring", part, "one of its ranks sends to the next host"),
        ("direct", per * 2 * (n - per) / n, "every rank sends to every rank"),
    ]
    for number, (name, amount, how) in enumerate(sent):
        y = 352 + 46 * number
        d.text(20, y + 16, name, 13.5, bold=True)
        d.bar(160, y + 3, amount * 100, 18, GREEN if amount == least else RED)
        note = "  the least possible" if amount == least else ""
        d.text(168 + amount * 100, y + 17, f"{amount:g} S{note}", 12)
        d.text(20, y + 33, how, 11, color="#52606d")
    d.text(20, 506, "auto takes one-shot for a few bytes and direct above on one host; "
           "hierarchical between hosts of several ranks.", 12, color="#52606d")  # fmt: skip
    d.save("algorithms.svg")


def recovery() -> None:
    """Three ranks; one is killed in step 4, a new one joins at step 6."""
    d = Drawing(900, 330, "Recovery of an elastic job")
    d.text(20, 28, "collectiverun -np 3 --min-np 2 --max-np 3: a rank is killed, and "
           "is replaced", 15, bold=True)  # fmt: skip
    names = ("rank 0", "rank 1", "rank 2", "joined as 3")
    ys = [52 + 56 * number for number in range(4)]
    for name, y in zip(names, ys, strict=True):
        d.text(20, y + 24, name, 13, bold=True)

    def cell(x, row, w, label, color, dash=False):
        d.box(x, ys[row], w, 38, color, dash=dash)
        d.text(x + w / 2, ys[row] + 24, label, 12, "middle")

    for row in range(3):
        cell(110, row, 80, "step 2", BLUE)
        cell(194, row, 80, "step 3", BLUE)
    for row in (0, 2):
        cell(278, row, 54, "step 4", GREY, dash=True)
        cell(336, row, 124, "group, newest state", GREEN)
        cell(464, row, 80, "step 4", BLUE)
        cell(548, row, 80, "step 5", BLUE)
        cell(632, row, 64, "group", GREEN)
        cell(700, row, 80, "step 6", BLUE)
        cell(784, row, 80, "step 7", BLUE)
    cell(278, 1, 40, "step 4", GREY, dash=True)
    d.line(310, ys[1] + 4, 334, ys[1] + 34, RED, 3)
    d.line(334, ys[1] + 4, 310, ys[1] + 34, RED, 3)
    d.text(344, ys[1] + 24, "kill -9", 13, bold=True, color=RED)
    cell(420, 3, 160, "load, build, trace", GREY)
    cell(584, 3, 44, "wait", GREY, dash=True)
    cell(632, 3, 64, "state", GREEN)
    cell(700, 3, 80, "step 6", BLUE)
    cell(784, 3, 80, "step 7", BLUE)
    d.text(20, 296, "The interrupted step is repeated with the same rows, cut for the "
           "ranks that are left. No finished step is repeated or skipped,", 12,
           color="#52606d")  # fmt: skip
    d.text(20, 314, "so every loss is the one of a job in which nothing happened.", 12,
           color="#52606d")  # fmt: skip
    d.save("recovery.svg")


def measured() -> dict[str, list[float]]:
    """Median, lowest and highest rate of each backend, from the page of measurements."""
    page = (ASSETS.parent / "reference" / "measurements.md").read_text()
    row = re.compile(r"^\| `([\w-]+)`([^|]*)\| ([\d,]+) \(([\d,]+)–([\d,]+)\)", re.M)
    return {
        name: [float(number.replace(",", "")) for number in numbers]
        for name, note, *numbers in row.findall(page.split("\n## ")[1])
        if "1 thread" not in note
    }


def comparison(results: dict) -> None:
    """Rates of every backend, and how far its model is from the reference's.

    Rates are those of the results; where these have none, those in the page of
    measurements.
    """
    proof = results["equal"]["float64"]
    timed = results["fast"].get(str(max(map(int, results["fast"] or [0]))), {})
    rates = {
        name: [statistics.median(run["rates"]), min(run["rates"]), max(run["rates"])]
        for name, run in timed.items()
        if run["rates"] and name != "one share"
    } or measured()
    order = sorted(rates, key=lambda name: -rates[name][0])
    top = max(high for _, _, high in rates.values())
    bottom = 66 + 34 * len(order)
    d = Drawing(900, bottom + 48, "Speed and sameness of every backend")
    d.text(20, 30, f"{max(results['options']['np'])} replicas on "
           f"{results['machine']['cores']} cores, model cnn", 15, bold=True)  # fmt: skip
    d.text(170, 56, "samples per second: median, lowest, highest", 12, color="#52606d")
    d.text(590, 56, f"largest relative difference from {proof['reference']}, float64",
           12, color="#52606d")  # fmt: skip

    def place(difference: float) -> float:
        """Where a difference is on the axis from 1e-17 to 1e-11."""
        return 590 + 270 * (math.log10(max(difference, 1e-17)) + 17) / 6

    for power in range(-17, -10, 2):
        x = place(10.0**power)
        d.line(x, 66, x, bottom, RULE, 0.6)
        label = "0" if power == -17 else f"1e{power}"
        d.text(x, bottom + 16, label, 11, "middle", color="#52606d")
    d.line(place(1e-12), 62, place(1e-12), bottom, RED, 1.5, dash=True)
    d.text(place(1e-12), bottom + 32, "limit 1e-12", 11, "middle", color=RED)
    for number, name in enumerate(order):
        y = 72 + 34 * number
        middle, low, high = rates[name]
        d.text(20, y + 15, name, 13, bold=name == order[0])
        width = 320 / top
        d.bar(170, y, middle * width, 20, GREY if name == "single" else BLUE)
        d.line(170 + low * width, y + 10, 170 + high * width, y + 10, ORANGE, 2.5)
        d.text(178 + high * width, y + 15, f"{middle:,.0f}", 12)
        verdict = proof["verdicts"].get(name)
        if name == "tf-parameter-server":
            d.text(596, y + 15, "asynchronous: not equal, by design", 12,
                   color="#52606d")  # fmt: skip
        elif name == proof["reference"] or verdict is None:
            reference = name == proof["reference"]
            d.text(596, y + 15, "the reference" if reference else "not in this run", 12,
                   color="#52606d")  # fmt: skip
        else:
            far = max(verdict["loss"] or 0, verdict["parameter"] or 0)
            color = GREEN if verdict["equal"] else RED
            d.parts.append(
                f'<circle cx="{place(far):.1f}" cy="{y + 10}" r="5.5" fill="{color}"/>'
            )
    d.save("comparison.svg")


def main(arguments: list[str]) -> None:
    """Draws all figures, or the comparison from a results.json."""
    if arguments:
        comparison(json.loads(Path(arguments[0]).read_text()))
        return
    for draw in (floors, step, algorithms, recovery):
        draw()


if __name__ == "__main__":
    main(sys.argv[1:])
