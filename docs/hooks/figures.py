"""Draws figures of the site that are computed: ``python docs/hooks/figures.py``.

Each picture has a light background of its own, so it can be read on light and dark
pages. ``step.svg`` and ``recovery.svg`` are drawn by hand: edit the files.
"""

from __future__ import annotations

import html
import textwrap
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "assets"
INK, SOFT, RULE, PAPER = "#1f2933", "#52606d", "#9aa5b1", "#ffffff"
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#7b8794"
PALE = {
    BLUE: "#dcebf5", ORANGE: "#fdf0d2", GREEN: "#d7efe7", RED: "#fbe3d6",
    GREY: "#eef1f4",
}  # fmt: skip


class Drawing:
    """An SVG picture, made from a few shapes."""

    def __init__(self, width: float, height: float, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" '
            'font-family="system-ui, Helvetica, Arial, sans-serif">'
            f"<title>{html.escape(title)}</title>"
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/>'
            "</marker></defs>"
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>'
        ]

    def add(self, tag: str, words: object = "", **attributes: object) -> None:
        """Add an element, with those of its attributes that are not None."""
        text = "".join(
            f' {name.replace("_", "-")}="{_short(value)}"'
            for name, value in attributes.items()
            if value is not None
        )
        self.parts.append(f"<{tag}{text}>{html.escape(str(words))}</{tag}>")

    def box(self, x, y, w, h, color=GREY, dash=False):
        """Add a rounded box in the pale form of a colour, with its border."""
        self.add("rect", x=x, y=y, width=w, height=h, rx=6, fill=PALE[color],
                 stroke=color, stroke_width=1.3,
                 stroke_dasharray="5 4" if dash else None)  # fmt: skip

    def bar(self, x, y, w, h, color):
        """Add a filled bar."""
        self.add("rect", x=x, y=y, width=max(w, 0.5), height=h, rx=2, fill=color)

    def text(self, x, y, words, size=13, anchor="start", bold=False, color=INK):
        """Add a line of text whose baseline begins at (x, y)."""
        self.add("text", words, x=x, y=y, font_size=size, fill=color,
                 text_anchor=anchor, font_weight=600 if bold else None)  # fmt: skip

    def note(self, x, y, words, size=12, anchor="start"):
        """Add a text of less weight."""
        self.text(x, y, words, size, anchor, color=SOFT)

    def line(self, x1, y1, x2, y2, color=INK, width=1.3, dash=False, tip=False):
        """Add a line, dashed or with an arrow's tip if asked for."""
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=color, stroke_width=width,
                 stroke_dasharray="4 4" if dash else None,
                 marker_end="url(#tip)" if tip else None)  # fmt: skip

    def save(self, name: str) -> None:
        """Write the picture into the assets."""
        ASSETS.mkdir(exist_ok=True)
        (ASSETS / name).write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def _short(value: object) -> str:
    return f"{round(value, 1):g}" if isinstance(value, float) else str(value)


def _flow(rooms: list[str], left: float, right: float) -> list[tuple[str, float, int]]:
    """Place rooms in rows, a new one at each ``|``; return their names, x, and rows."""
    placed, x, row = [], left, 0
    for room in rooms:
        if room == "|" or x + _width(room) > right:
            x, row = left, row + 1
        if room != "|":
            placed.append((room, x, row))
            x += _width(room) + 8
    return placed


def _width(room: str) -> float:
    return 18 + 7.3 * len(room)


def floors() -> None:
    """Draw the floors, the rooms of each, and the direction of imports."""
    stories = [
        ("train.py   compare.py", "parse options, call one function", GREY, []),
        ("collective/comparison/", "the same training on every backend: equal? how fast?", RED,
         ["runs", "equality", "speed", "tables"]),
        ("collective/training/", "the step, the input, the loop", BLUE,
         ["calls", "partition", "steps", "loop", "observers", "input", "|", "model",
          "verification", "unedited", "keras_compat"]),
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
    placed = [_flow(rooms, left, width - 60) for *_, rooms in stories]
    notes = [textwrap.wrap(what, 33) for _, what, *_ in stories]
    heights = [
        max(40 + 15 * len(lines), 52 + 32 * max((row for *_, row in rooms), default=0))
        for lines, rooms in zip(notes, placed, strict=True)
    ]
    d = Drawing(width, sum(heights) + 12 * len(heights) + 40, "Floors and rooms")
    y = 14.0
    for (name, _, color, _), lines, rooms, height in zip(
        stories, notes, placed, heights, strict=True
    ):
        d.box(14, y, width - 62, height, color)
        d.text(28, y + 24, name, 15, bold=True)
        for number, line in enumerate(lines):
            d.note(28, y + 42 + 15 * number, line, 11.5)
        for room, x, row in rooms:
            w, top = _width(room), y + 12 + 32 * row
            d.add("rect", x=x, y=top, width=w, height=24, rx=4, fill=PAPER,
                  stroke=color)  # fmt: skip
            d.text(x + w / 2, top + 16.5, room, 12.5, "middle")
        y += height + 12
    d.line(width - 28, 24, width - 28, y - 18, tip=True)
    d.add("text", "imports go down only", fill=INK, font_size=12, text_anchor="middle",
          transform=f"translate({width - 12} {y / 2}) rotate(90)")  # fmt: skip
    d.note(28, y + 14, "Each floor is one Python package below collective. A white box "
           "is a file or a room.")  # fmt: skip
    d.save("floors.svg")


def algorithms() -> None:
    """Draw syncs and bytes of each all-reduce, for 8 ranks, and over two hosts."""
    n = 8
    part = 2 * (n - 1) / n
    local = [
        ("one-shot", 1, n - 1.0, 1.0, "each reads all data of every rank"),
        ("direct", 2, part, 1.0, "each sums its part, and copies the other sums"),
    ]
    d = Drawing(900, 336, "All-reduce algorithms: steps and bytes")
    d.text(20, 30, f"On one host, {n} ranks, S bytes on each", 15, bold=True)
    for x, label in ((160, "synchronizations"), (400, "shared memory read, per rank"),
                     (640, "shared memory written, per rank")):  # fmt: skip
        d.note(x, 56, label)

    def row(y: float, name: str, how: str, *bars: tuple[int, float, str, str]) -> None:
        """Draw an algorithm's name and its bars: x, width, colour and label of each."""
        d.text(20, y + 16, name, 13.5, bold=True)
        d.note(20, y + 33, how, 11)
        for x, w, color, label in bars:
            d.bar(x, y + 3, w, 18, color)
            d.text(x + w + 6, y + 17, label, 12)

    for number, (name, syncs, loads, stores, how) in enumerate(local):
        chunked = " a chunk" if name == "direct" else ""
        row(72 + 46 * number, name, how,
            (160, syncs * 11, GREY, f"{syncs}{chunked}"),
            (400, loads * 24, BLUE, f"{loads:g} S"),
            (640, stores * 24, ORANGE, f"{stores:g} S"))  # fmt: skip
    hosts, per = 2, 4
    d.text(20, 198, f"Between {hosts} hosts of {per} ranks: bytes that a host sends",
           15, bold=True)  # fmt: skip
    least = 2 * (hosts - 1) / hosts
    # direct: each rank sends 2(n-1)/n S; n - per of its n-1 peers are on the other
    # host.
    sent = [
        ("hierarchical", least, "sum on the host first; every rank sends its lane"),
        ("direct", per * 2 * (n - per) / n, "every rank sends to every rank"),
    ]
    for number, (name, amount, how) in enumerate(sent):
        color = GREEN if amount == least else RED
        note = "  the least possible" if amount == least else ""
        bar = (160, amount * 100, color, f"{amount:g} S{note}")
        row(214 + 46 * number, name, how, bar)
    d.note(20, 322, "auto takes one-shot for a few bytes and direct above on one host; "
           "hierarchical between hosts of several ranks.")  # fmt: skip
    d.save("algorithms.svg")


if __name__ == "__main__":
    floors()
    algorithms()
