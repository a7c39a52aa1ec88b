"""The page of results, made from a run."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tests.keras_coverage.case import BATCH, ROWS
from tests.keras_coverage.table import ALIASES, CASES, GROUPS

_HEAD = """# What of Keras is trained alike

*Written by `make test-keras TABLE=docs/reference/keras-coverage.md`: Keras {keras}, TensorFlow
{tensorflow}.*

Each object stands in a small model, which stock Keras trains in one process, and `collective.fit` on
{ranks} ranks (backend `native`): {rows} rows in batches of {batch}, of which the last has two rows. Equal are
weights, state of optimizer and layers, history and the result of `evaluate`, to 10⁻¹⁰ in float64
(to 10⁻⁵ in float32 where Keras or TensorFlow has no float64).
*Gathered* names the operations for which rows are gathered, and *bytes* how much a batch of {batch} rows
then gathers in the forward and in the backward pass, all steps together: a test lets no number grow. *Whole* names those that every rank computes
for all rows, *from rank 0* the draws that rank 0 makes for all; a sum of gradients is in every row.
Objects with the same result share a line. {equal} of {all} objects are equal; names of the same object
count once and are in parentheses.
"""

_WHY = """## Why rows are gathered

`CutMix`, `MixUp` and `shuffle` mix rows of the whole batch, and `Circle` compares all pairs. Words of
`TextVectorization` are split and features of `HashedCrossing` crossed whole, into tensors of no fixed
length; what follows is by rows. `categorical` draws from one stream for all rows.
`ContrastLimitedAdaptiveHistogramEqualization` looks up by a number computed of image and pixel, which
may name any image.
"""

_COLUMNS = 6
_LINES = (
    r"gathered(?: for a gradient)?: .*, for (.*)$",
    r"computed whole on every rank: (\w+) at",
    r"as rank 0 made it: (\w+) at",
)


@dataclass(frozen=True)
class _Result:
    """The results of an object, on all numbers of ranks."""

    is_equal: bool | None  # None: it was not tried
    gathered: tuple[str, ...]
    whole: tuple[str, ...]
    drawn: tuple[str, ...]
    sent: tuple[int, int]  # bytes that are gathered, forward and backward

    @property
    def cells(self) -> str:
        """Return the columns after the names."""
        found = [
            ", ".join(f"`{t}`" for t in types) or "–"
            for types in (self.gathered, self.whole, self.drawn)
        ]
        words = {True: "yes", False: "**no**", None: "not run"}
        sent = "–" if self.sent == (0, 0) else f"{self.sent[0]} / {self.sent[1]}"
        return " | ".join([words[self.is_equal], found[0], sent, *found[1:]])


def read(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the last results of each object, for each number of ranks."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        found[entry["name"]][entry["ranks"]] = entry
    return {name: list(entries.values()) for name, entries in found.items()}


def exchanged(lines: list[str]) -> bool:
    """Return whether lines of ``--explain`` name more than sums."""
    return any(_types(lines, pattern) for pattern in _LINES)


def _result(entries: list[dict[str, Any]]) -> _Result:
    lines = [line for entry in entries for line in entry.get("lines", [])]
    return _Result(
        not any(entry["apart"] for entry in entries) if entries else None,
        *(_types(lines, pattern) for pattern in _LINES),
        sent=max((sent(entry.get("lines", [])) for entry in entries), default=(0, 0)),
    )


def sent(lines: list[str]) -> tuple[int, int]:
    """Return the bytes that lines of ``--explain`` gather: forward, and for gradients."""
    found = {False: 0, True: 0}
    for line in lines:
        match = re.search(
            r"gathered( for a gradient)?: .*, ([\d.]+) (MB|bytes), for", line
        )
        if match:
            size = float(match[2]) * (1e6 if match[3] == "MB" else 1)
            found[match[1] is not None] += round(size)
    return found[False], found[True]


def recorded(text: str) -> dict[str, tuple[int, int]]:
    """Return the bytes that a page has, by the name of an object of Keras."""
    found: dict[str, tuple[int, int]] = {}
    prefix = ""
    for line in text.splitlines():
        if line.startswith("## keras."):
            prefix = line.removeprefix("## keras.")
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != _COLUMNS or not re.fullmatch(r"–|\d+ / \d+", cells[3]):
            continue
        numbers = [int(n) for n in re.findall(r"\d+", cells[3])]
        forward, backward = numbers or (0, 0)
        for name in re.findall(r"`(\w+)`", cells[0]):
            found[f"{prefix}.{name}"] = forward, backward
    return found


def grown(
    before: dict[str, tuple[int, int]], found: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return what gathers more than a page says, with the numbers of both."""
    now = {name: _result(entries).sent for name, entries in found.items()}
    return {
        name: (before[name], sizes)
        for name, sizes in now.items()
        if name in before
        and any(a > b for a, b in zip(sizes, before[name], strict=True))
    }


def _types(lines: list[str], pattern: str) -> tuple[str, ...]:
    found = (re.search(pattern, line) for line in lines)
    types = {t for m in found if m for t in m.group(1).split(", ")}
    return tuple(sorted(types - {"Shape"}))  # Shape does not read numbers


def text(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the page."""
    results = {name: _result(found.get(name, [])) for name in CASES}
    equal = sum(result.is_equal is True for result in results.values())
    ranks = {entry["ranks"] for entries in found.values() for entry in entries}
    for entries in found.values():  # numbers of ranks on which every object was tried
        ranks &= {entry["ranks"] for entry in entries}
    parts = [
        _HEAD.format(
            keras=keras.__version__,
            tensorflow=tf.__version__,
            rows=ROWS,
            batch=BATCH,
            equal=equal,
            all=len(results),
            ranks=" and ".join(map(str, sorted(ranks))),
        )
    ]
    for prefix, group in GROUPS.items():
        names = [n for n in CASES if n.rpartition(".")[0] == prefix]
        parts.append(f"## keras.{prefix}\n\n{_table(names, results)}")
        if group.excluded:
            reasons = _inverted(group.excluded)
            parts.append(
                "Not trained: "
                + "; ".join(
                    f"{', '.join(f'`{n}`' for n in sorted(names))} ({reason})"
                    for reason, names in reasons.items()
                )
                + ".\n"
            )
    return "\n".join([*parts, _WHY])


def _table(names: list[str], results: dict[str, _Result]) -> str:
    alike = _inverted({name: results[name].cells for name in names})
    lines = [
        "| object | equal | gathered for | bytes | whole | from rank 0 |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {', '.join(map(_called, same))} | {cells} |"
        for cells, same in alike.items()
    ]
    return "\n".join(lines) + "\n"


def _inverted(of: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, value in of.items():
        found[value].append(name)
    return found


def _called(full: str) -> str:
    """Return a name, and other names of its module for the same object."""
    prefix, _, name = full.rpartition(".")
    found = [other.removeprefix(f"{prefix}.") for other in ALIASES[full]]
    return f"`{name}`" + (f" ({', '.join(f'`{n}`' for n in found)})" if found else "")
