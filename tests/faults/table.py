"""The tables of docs/reference/reliability.md, made from the measurements of runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.fault import Fault

BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"
HEAD = (
    "| fault | backend | launcher, ranks | what follows | exit code "
    "| promised | measured |\n|---|---|---|---|---|---|---|\n"
)
LINE = "<br>"  # separates faults that share a row

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Measured:
    """The outcome of a fault.

    Attributes:
        fault: The fault.
        seconds: From the fault until no process of the job was alive; None if the job
            continued.
        not_run: The reason why it was not tried; empty if it was.
    """

    fault: Fault
    seconds: float | None = None
    not_run: str = ""

    @property
    def text(self) -> str:
        """Return the last cell of its row."""
        if self.not_run:
            return f"not run: {self.not_run}"
        return "held" if self.seconds is None else f"{self.seconds:.1f} s"


def key(fault: Fault) -> Key:
    """Return a key that no other fault has."""
    return fault.name, fault.backend, f"{fault.started_by}, {fault.ranks}"


def _alike(fault: Fault) -> tuple[str, ...]:
    """Return the cells between the first and the last; faults in a row share them."""
    code = 128 - fault.code if fault.code < 0 else fault.code
    promised = "" if fault.seconds is None else f"{fault.seconds:g} s"
    return *key(fault)[1:], fault.promise, str(code), promised


def known(file: Path) -> dict[Key, str]:
    """Return the last cell of each fault in a file's tables."""
    found = {}
    for line in file.read_text().split(BEGIN)[1].split(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 7 and cells[0] != "fault":
            names, times = cells[0].split(LINE), cells[-1].split(LINE)
            for name, time in zip(names, times, strict=True):
                found[name, cells[1], cells[2]] = time
    return found


def table(faults: Iterable[Fault], cells: Mapping[Key, str]) -> str:
    """Return a table of faults, with the last cell of each."""
    rows = []
    for alike, group in itertools.groupby(faults, _alike):
        keys = [key(fault) for fault in group]
        names = LINE.join(name for name, *_ in keys)
        times = LINE.join(cells.get(one, "not run: not yet") for one in keys)
        rows.append(f"| {' | '.join([names, *alike, times])} |\n")
    return HEAD + "".join(rows)


def write(
    file: Path, sections: Mapping[str, Sequence[Fault]], measured: Sequence[Measured]
) -> None:
    """Write a run into the tables; keep old measurements of other faults."""
    cells = known(file) | {key(one.fault): one.text for one in measured}
    head, rest = file.read_text().split(BEGIN)
    _, tail = rest.split(END)
    tables = "\n".join(
        f"### {title}\n\n{table(faults, cells)}" for title, faults in sections.items()
    )
    file.write_text(f"{head}{BEGIN}{tables}{END}{tail}")
