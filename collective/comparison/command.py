"""``compare.py``: runs the comparison, prints tables, writes the results."""

from __future__ import annotations

import argparse
import signal
from typing import NoReturn

from rich import progress as bars
from rich.console import Console
from rich.table import Table as RichTable

from collective import json_file
from collective import train as cli
from collective.comparison import plot, tables
from collective.comparison.equality import TOLERANCE
from collective.comparison.results import Results
from collective.comparison.runs import Comparison, ComparisonOptions
from collective.errors import UsageError, printable

FIXED_OPTIONS = ("--backend", "--checkpoint-dir", "--checkpoint-every", "--checkpoint-keep",
        "--devices", "--hook", "--ledger", "--list-backends", "--resume",
        "--timeline", "--verbose")  # fmt: skip
RUN_SECONDS = 12.0  # of a run on two idle cores, most of which starts TensorFlow
STYLES = {"good": "green", "bad": "bold red", "": ""}


def compare(args: argparse.Namespace, rest: list[str], command: str) -> int:
    """Compare, print, and write the results.

    Args:
        args: The options that ``compare.parser()`` has parsed.
        rest: Options for ``train.py``.
        command: The command line as typed, for the results.

    Returns:
        0; 1 if a backend is not equal or a run failed; 130 if interrupted, 143 if
        terminated (the finished runs are reported).
        terminated (the finished runs are reported).

    Raises:
        UsageError: If an option is invalid or the file cannot be written.
    """
    for option in rest:
        if option.split("=")[0] in FIXED_OPTIONS:
            raise UsageError(
                f"{option} is not for compare.py, which runs every backend",
                hint="python compare.py --help",
            )
    if args.precision:
        rest = [*rest, "--precision", args.precision]
    train = cli.parser().parse_args(rest)  # fails on a wrong option before any run
    results = Results({**vars(args), "train": rest, "command": command})
    length = {"--steps", "--epochs"} & set(rest)
    steps = [] if length else ["--steps", "60"]
    virtual = train.virtual_replicas is not None
    apart = args.full or args.rounds or args.only
    quick = not (apart or length or virtual or len(args.np) > 1)
    plan = ComparisonOptions(
        args.np,
        tuple(filter(None, args.backends.split(","))),
        args.rounds or 3,
        args.global_batch_size,
        (*rest, *steps),
        precisions=() if args.only == "fast" else _precisions(args.precision, quick),
        time=args.only != "equal",
        seconds=args.deadline,
        virtual=virtual,
        quick=quick,
    )
    console = Console(highlight=False, markup=False, emoji=False)
    comparison = Comparison(plan, results)
    if args.json:
        json_file.check_writable("--json", args.json)
    if args.plot:
        json_file.check_writable("--plot", args.plot)
        plot.check_matplotlib()
    results.look_at_machine()
    _announce(comparison, console)
    signalled = _run(comparison, console)
    results.look_at_machine()
    _show(results, console)
    if quick:
        console.print(
            "\nEach backend was started once. --full repeats the timed runs in turns, and "
            "adds\nfloat32 and the speed of asynchronous backends."
        )
    if args.json:
        results.write(args.json)
    if args.plot:
        plot.draw(results, args.plot)
    if signalled:
        return 128 + signalled
    return int(not results.all_equal or results.failed)


def _announce(comparison: Comparison, console: Console) -> None:
    """Print how long the comparison will take, and whether its times will be meaningful."""
    seconds = comparison.runs * RUN_SECONDS
    console.print(
        f"{comparison.runs} runs: about {seconds / 60:.0f} min with the default model on two "
        "idle cores"
    )
    if busy := comparison.results.busy:
        console.print(
            f"{busy[0].upper()}{busy[1:]} just now: the runs take longer, and their times say "
            "little. What is equal does not depend on it."
        )


def _precisions(asked: str | None, quick: bool) -> tuple[str, ...]:
    """Return the precisions of the equality test: the requested one, or all."""
    return (
        (asked,) if asked in TOLERANCE else ("float64",) if quick else tuple(TOLERANCE)
    )


def _run(comparison: Comparison, console: Console) -> int:
    """Run the comparison under a bar; return the signal that interrupted it, or 0."""
    text = bars.TextColumn("{task.description}", markup=False)
    columns = text, bars.BarColumn(), bars.MofNCompleteColumn()
    with bars.Progress(
        *columns, bars.TimeRemainingColumn(), console=console
    ) as progress:
        task = progress.add_task("", total=comparison.runs)
        done = 0

        def report(what: str, figures: str | None) -> None:
            nonlocal done
            if figures is not None:
                done += 1
                progress.update(task, completed=done)
                if figures:
                    console.print(f"  {printable(figures)}")
                return
            progress.update(task, description=what)
            if not console.is_terminal:
                seconds = progress.tasks[0].time_remaining
                left = f", about {seconds:.0f} s left" if seconds else ""
                console.print(f"{done + 1} of {comparison.runs}{left}: {what}")

        def terminate(number: int, _: object) -> NoReturn:
            raise KeyboardInterrupt(number)

        # A batch system sends SIGTERM at its time limit.
        earlier = signal.signal(signal.SIGTERM, terminate)
        try:
            comparison.run(report)
        except KeyboardInterrupt as interrupt:
            return interrupt.args[0] if interrupt.args else signal.SIGINT
        finally:
            signal.signal(signal.SIGTERM, earlier)
        progress.update(task, description="done")
    return 0


def _show(results: Results, console: Console) -> None:
    for table in tables.tables(results):
        _show_table(table, console)
    console.print(f"\n{results.verdict}", style="bold")


def _show_table(table: tables.Table, console: Console) -> None:
    shown = RichTable(title=table.title, title_justify="left", box=None,
                      pad_edge=False, title_style="bold")  # fmt: skip
    for i, column in enumerate(table.columns):
        text = i == 0 or len(table.columns) == 2
        shown.add_column(column, justify="left" if text else "right")
    for row, mark in zip(table.rows, table.marks, strict=True):
        shown.add_row(*map(printable, row), style=STYLES[mark])
    console.print()
    console.print(shown)
    for sentence in table.sentences:
        console.print(f"  {printable(sentence)}", style="dim")
