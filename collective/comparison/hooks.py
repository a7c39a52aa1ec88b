"""``compare.py --hooks``: what compressed gradients save in time, and cost in loss.

The same training once for each way to send gradients: as they are, rounded to 16 bits,
or compressed by a communication hook. Those with a hook are not equal to one process, so
the table has curves, and no verdict.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from collective import python_command
from collective import train as cli
from collective.backends import launching
from collective.comparison import page
from collective.comparison.command import make_folder, show, writing
from collective.comparison.results import Results
from collective.comparison.tables import Table
from collective.errors import UsageError
from collective.fit_options import NOT_EQUAL

BACKEND = "native"
NONE, ROUNDED = "none", ("bfloat16", "float16")
# A loss is the mean over so many steps.
OVER = 10
POINTS = 8  # of a curve
STEPS = "300"


def options_of(name: str) -> list[str]:
    """The options of ``train.py`` for a way to send gradients."""
    if name == NONE:
        return []
    return ["--transport-dtype" if name in ROUNDED else "--hook", name]


def compare_hooks(args: argparse.Namespace, rest: Sequence[str], command: str) -> int:
    """Trains in each way, prints the table and writes the report folder.

    Args:
        args: From ``compare.parser()``.
        rest: Options for ``train.py``.
        command: The command line as typed, for the report.

    Returns:
        0; 1 if a run failed.

    Raises:
        UsageError: An option is invalid or the folder cannot be written.
    """
    backend, names = args.backends or BACKEND, args.hooks.split(",")
    if "--hook" in rest or "--transport-dtype" in rest:
        raise UsageError(
            "--hooks has the ways to send gradients, and another one is given beside it",
            hint=f"--hooks {NONE},bfloat16,powersgd:4",
        )
    cli.parser().parse_args(rest)  # fails on a wrong option before any run
    make_folder(args.output)
    length = [] if {"--steps", "--epochs"} & set(rest) else ["--steps", STEPS]
    options = [*rest, *length, "--global-batch-size", str(args.global_batch_size)]
    console = Console(highlight=False, markup=False, emoji=False)
    summaries: dict[str, dict[str, Any]] = {}
    failures = 0
    for name in names:
        console.print(f"{backend}, {args.np[-1]} replicas: {name}")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "summary.json")
            train = [*options, *options_of(name), "--verbose", "0", "--json", str(file)]
            program = python_command.arguments("collective.train", *train)
            line = launching.line(backend, args.np[-1], program)
            if args.launch:
                line = [*shlex.split(args.launch), *line[line.index("-np") :]]
            ended = launching.run(line, args.deadline)
            if ended.failure:
                failures += 1
                console.print(f"  {ended.failure}\n{ended.tail}")
            else:
                summaries[name] = json.loads(file.read_text())
    if summaries:
        table = curves(summaries)
        show(table, console)
        with writing(args.output):
            (args.output / "hooks.json").write_text(json.dumps(summaries, indent=1))
            results = Results({"command": command, "train": options})
            page.write(args.output / "report.html", results, [table], {})
        console.print(f"\nReport: {args.output / 'report.html'}")
    return int(failures > 0)


def curves(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """The table of some trainings, by the names of how they sent gradients.

    Args:
        summaries: What ``train.py --json`` has written of each.
    """
    first = next(iter(summaries.values()))
    title = f"Compressed gradients: {first['backend']}, {first['replicas']} replicas"
    table = Table(title, ["", *map(shown, summaries, summaries.values())])
    found = {name: means(summary["losses"]) for name, summary in summaries.items()}
    seconds = {n: sum(s["seconds_per_step"].values()) for n, s in summaries.items()}

    def add(what: str, values: Sequence[Any], form: str) -> None:
        table.add("", what, *("" if v is None else format(v, form) for v in values))

    add("gradients, bytes a step",
        [s["gradient_bytes"] for s in summaries.values()], ",")  # fmt: skip
    add("a step, ms", [1e3 * s for s in seconds.values()], ".1f")
    count = min(map(len, found.values()))
    for step in sorted({count * part // POINTS for part in range(1, POINTS + 1)} - {0}):
        add(
            f"loss at step {step}",
            [losses[step - 1] for losses in found.values()],
            ".4f",
        )
    # That all of them reach.
    target = max(min(losses) for losses in found.values())
    steps = {n: next(i for i, v in enumerate(losses, 1) if v <= target)
             for n, losses in found.items()}  # fmt: skip
    add(f"steps to a loss of {target:.4f}", list(steps.values()), ",")
    add("seconds to it", [steps[n] * seconds[n] for n in summaries], ".2f")
    table.sentences += [
        f"Losses are means over {OVER} steps; the loss to be reached is the lowest that "
        "all reach.",
        "Seconds to it are the steps, times the mean time of one.",
    ]
    table.sentences += [
        f"{name} is {NOT_EQUAL}, by design: {why}."
        for name, summary in summaries.items()
        if (why := summary["not_equal_to_one_process"])
    ]
    return table


def shown(name: str, summary: Mapping[str, Any]) -> str:
    """The name of a training in an output."""
    return f"{name} ({NOT_EQUAL})" if summary["not_equal_to_one_process"] else name


def means(losses: Sequence[float | None]) -> list[float]:
    """Of each step, the mean loss of those up to it; not finite ones are infinite."""
    finite = [float("inf") if loss is None else loss for loss in losses]
    windows = [finite[max(0, end - OVER) : end] for end in range(1, len(finite) + 1)]
    return [sum(window) / len(window) for window in windows]
