"""The demo: ordinary programs on one process, with stock TensorFlow, and on our ranks.

    python examples/demo
    python examples/demo docs/assets/demo.svg    # and a picture of the printed table

It prints one table, and ends with code 1 if our ranks have trained a different model from
one process.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
ONE = "python"
OURS = "collectiverun -np 2 --keras"
ELASTIC = "collectiverun -np 2 --min-np 1 --keras"
TOLERANCE = 2e-6  # relative, because losses are of float32
WIDE = 100  # columns of a terminal that has room for each command
BUSY = 0.15  # share of the cores from which on a time says little


@dataclass(frozen=True)
class Run:
    """A way to run a program.

    Attributes:
        what: Its description.
        launch: The words before the program.
        program: A file of this folder, and its arguments.
        why: The reason if its model differs from one process.
        workers: How many processes with ``TF_CONFIG`` run it.
        kills: Whether the second rank is killed during the training.
    """

    what: str
    launch: str
    program: str
    why: str = ""
    workers: int = 1
    kills: bool = False

    @property
    def command(self) -> str:
        """Return the command, as a user types it in this folder."""
        return f"{self.launch} {self.program}"

    @property
    def is_plain(self) -> bool:
        """Return whether it may share its processes with other programs."""
        return not (self.why or self.kills or self.workers > 1)

    @property
    def is_ours(self) -> bool:
        """Return whether it has to train the model of one process."""
        return "--keras" in self.launch


PROGRAMS: dict[str, list[Run]] = {
    "TensorFlow's tutorial for several workers": [
        Run("one process", ONE, "tutorial.py"),
        Run("stock, 2 workers with TF_CONFIG", ONE, "tutorial.py", workers=2),
        Run("ours, 2 ranks", OURS, "tutorial.py"),
    ],
    "BatchNormalization, clipnorm, a short last batch": [
        Run("one process", ONE, "clipped.py"),
        Run(
            "stock MirroredStrategy, 2 replicas",
            ONE,
            "clipped.py mirrored",
            why="clips before it sums",
        ),
        Run("ours, 2 ranks", OURS, "clipped.py"),
    ],
    "A loss of the hardest rows of a batch": [
        Run("one process", ONE, "hard_examples.py"),
        Run(
            "each rank its own, averaged (Horovod's way)",
            "collectiverun -np 2 python",
            "hard_examples.py averaged",
            why="not the hardest of the batch",
        ),
        Run("ours, 2 ranks", OURS, "hard_examples.py"),
    ],
    "kill -9 of a rank in step 20": [
        Run("one process, nothing killed", ONE, "killed.py"),
        Run("ours, one of 2 ranks is killed", ELASTIC, "killed.py", kills=True),
    ],
}


@dataclass(frozen=True)
class Outcome:
    """The output of a run, and its exit code."""

    code: int
    printed: str

    @property
    def loss(self) -> float | None:
        """Return the final loss; None if the run has failed."""
        found = re.search(r"loss: ([\d.e+-]+)", self.printed)
        return float(found[1]) if found and not self.code else None

    @property
    def error(self) -> str:
        """Return the kind of error that it ended with."""
        found = re.findall(r"^(?:\[\d\] )?(\w+Error)", self.printed, re.M)
        return found[-1] if found else f"exit code {self.code}"

    @property
    def longest_step(self) -> str:
        """Return the longest step if it was measured, or an empty text."""
        found = re.search(r"longest step: ([\d.]+ s)", self.printed)
        return f", longest step {found[1]}" if found else ""


def outcome(run: Run) -> Outcome:
    """Run it to its end; return its outcome."""
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", COLLECTIVE_RECORDER="off")
    environment["PATH"] = f"{BIN}{os.pathsep}{environment.get('PATH', '')}"
    workers = [f"localhost:{port}" for port in _free_ports(run.workers)]
    processes = []
    for index in range(run.workers):
        if run.workers > 1:
            task = {"type": "worker", "index": index}
            config = {"cluster": {"worker": workers}, "task": task}
            environment["TF_CONFIG"] = json.dumps(config)
        processes.append(
            subprocess.Popen(
                run.command.split(),
                cwd=HERE,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    first = processes[0]
    assert first.stdout is not None
    lines = []
    for line in first.stdout:
        lines.append(line)
        if run.kills and "at step 20" in line:
            _second_rank(first.pid).kill()
    code = first.wait()
    for other in processes[1:]:  # it waits for the first one in vain
        other.kill()
        other.communicate()
    return Outcome(code, "".join(lines))


def _second_rank(launcher: int) -> psutil.Process:
    """Return the process with the script of rank 1."""
    for process in psutil.Process(launcher).children(recursive=True):
        if process.environ().get("COLLECTIVE_RANK") == "1":
            return process
    raise RuntimeError("rank 1 does not run")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def together(launch: str, runs: Sequence[Run]) -> dict[Run, Outcome]:
    """Run several programs in the same processes, so that they start once."""
    found = outcome(Run("", f"{launch} together.py", " ".join(r.program for r in runs)))
    parts = found.printed.split("== ")[1:]
    # A program that never began gets all of the output.
    parts += [found.printed] * (len(runs) - len(parts))
    failed = [found.code if i == len(runs) - 1 else 0 for i in range(len(runs))]
    return {
        run: Outcome(code, part)
        for run, part, code in zip(runs, parts, failed, strict=True)
    }


def outcomes(runs: Sequence[Run]) -> dict[Run, Outcome]:
    """Make all runs, two at a time; timed runs are alone, at the end."""
    plain = {
        launch: [r for r in runs if r.is_plain and r.launch == launch]
        for launch in (ONE, OURS)
    }
    alone = [run for run in runs if not run.is_plain and not run.kills]
    with ThreadPoolExecutor(2) as pool:
        shared = pool.map(lambda launch: together(launch, plain[launch]), plain)
        found = dict(zip(alone, pool.map(outcome, alone), strict=True))
        for part in shared:
            found |= part
    return found | {run: outcome(run) for run in runs if run.kills}


def verdict(run: Run, found: Outcome, wanted: Outcome) -> tuple[str, bool]:
    """Return a word that compares a run with one process, and whether it is right."""
    if found.loss is None:
        return f"ends with a {found.error}", not run.is_ours and bool(wanted.loss)
    if found is wanted:
        return "", True
    assert wanted.loss is not None
    apart = abs(found.loss - wanted.loss) / abs(wanted.loss)
    if apart <= TOLERANCE:
        rounding = f", {apart:.0e} apart by rounding" if apart else ""
        return f"equal{rounding}{found.longest_step}", True
    return f"another model, {apart:.2g} apart: {run.why or 'why?'}", not run.is_ours


def indented(text: str, columns: int) -> Padding:
    """Return a text whose lines all begin at a column, those that are wrapped, too."""
    return Padding(Text.from_markup(text), (0, 0, 0, columns))


def picture(console: Console) -> str:
    """Return an SVG of the console's text, with fonts of the reader's machine only."""
    drawn = console.export_svg(title="make demo")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S)


def main(svg: str | None = None) -> int:
    """Run everything, and print the table.

    Args:
        svg: A file for a picture of the table.
    """
    runs = [run for ways in PROGRAMS.values() for run in ways]
    busy = psutil.cpu_percent(1.0) / 100  # while nothing of ours runs
    console = Console(record=svg is not None, width=None if svg is None else 108)
    with console.status("trains, two jobs at a time"):
        found = outcomes(runs)
    wide = console.width >= WIDE  # then a command is one line
    table = Table(title="The same script, the same numbers?")
    table.add_column("program", no_wrap=wide)
    table.add_column("loss", no_wrap=True)
    table.add_column("beside one process")
    is_well = True
    for title, ways in PROGRAMS.items():
        table.add_row(f"[bold]{title}")
        for run in ways:
            one = found[run]
            text, well = verdict(run, one, found[ways[0]])
            is_well &= well
            loss = "-" if one.loss is None else f"{one.loss:.7g}"
            colour = "green" if text.startswith("equal") else "red"
            way = Group(indented(run.what, 2), indented(f"[dim]{run.command}", 4))
            table.add_row(way, loss, f"[{colour}]{text}")
            if not well:
                console.print(one.printed, markup=False)
        table.add_section()
    console.print(table)
    console.print(
        "Type a command in examples/demo, where the programs are.\n"
        "Losses are of float32: sums in another order round otherwise."
    )
    if busy > BUSY:
        console.print(
            f"Other programs used {busy:.0%} of the cores: a time says little here."
        )
    if svg is not None:
        Path(svg).write_text(picture(console))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
