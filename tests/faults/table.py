"""The table of docs/reliability.md, made of what a run has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.fault import Fault

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
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
            went on, or was not tried.
        skipped: Why it was not tried; empty if it was.
    """

    fault: Fault
    seconds: float | None = None
    skipped: str = ""

    @property
    def row(self) -> str:
        """A line of the table."""
        fault = self.fault
        code = 128 - fault.code if fault.code < 0 else fault.code
        cells = [
            fault.name,
            fault.backend,
            f"{fault.started_by}, {fault.ranks}",
            fault.promise,
            str(code),
            "" if fault.seconds is None else f"{fault.seconds:g} s",
            f"not run: {self.skipped}" if self.skipped else _seconds(self.seconds),
        ]
        return f"| {' | '.join(cells)} |\n"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def write(file: Path, measured: Sequence[Measured]) -> None:
    """Puts the table between the two marks of a file."""
    text = file.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    rows = "".join(one.row for one in measured)
    file.write_text(f"{head}{BEGIN}\n{HEAD}{rows}{END}{tail}")
