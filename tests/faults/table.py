"""The table of docs/reference/reliability.md, made of what runs have measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.fault import Fault

BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"
HEAD = (
    "| fault | backend | launcher, ranks | what follows | exit code "
    "| promised | measured |\n|---|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True)
class Measured:
    """How a fault went.

    Attributes:
        fault: Which.
        seconds: From the fault until nothing of the job was alive; None where the job
            went on.
        not_run: Why it was not tried; empty if it was.
    """

    fault: Fault
    seconds: float | None = None
    not_run: str = ""

    @property
    def row(self) -> str:
        """A line of the table."""
        fault = self.fault
        code = 128 - fault.code if fault.code < 0 else fault.code
        measured = "held" if self.seconds is None else f"{self.seconds:.1f} s"
        cells = [
            *key(fault),
            fault.promise,
            str(code),
            "" if fault.seconds is None else f"{fault.seconds:g} s",
            f"not run: {self.not_run}" if self.not_run else measured,
        ]
        return f"| {' | '.join(cells)} |\n"


def key(fault: Fault) -> tuple[str, ...]:
    """The first cells of a row, which no other row has."""
    return fault.name, fault.backend, f"{fault.started_by}, {fault.ranks}"


def rows(file: Path) -> dict[tuple[str, ...], str]:
    """The rows of a file's table."""
    table = file.read_text().split(BEGIN)[1].split(END)[0]
    lines = table.splitlines(keepends=True)[2:]
    return {tuple(line.strip("| \n").split(" | ")[:3]): line for line in lines}


def write(file: Path, faults: Sequence[Fault], measured: Sequence[Measured]) -> None:
    """Puts a run into the table; what it did not try stays as it was measured."""
    known = rows(file) | {key(one.fault): one.row for one in measured}
    never = [Measured(fault, not_run="not yet") for fault in faults]
    lines = [known.get(key(one.fault), one.row) for one in never]
    head, rest = file.read_text().split(BEGIN)
    _, tail = rest.split(END)
    file.write_text(f"{head}{BEGIN}{HEAD}{''.join(lines)}{END}{tail}")
