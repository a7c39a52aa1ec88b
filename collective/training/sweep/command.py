"""``train.py --sweep FILE``: runs the trainings of a file, prints a table, plots losses.

The file is YAML; ``docs/how-to/sweeps.md`` describes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from collective.errors import UsageError
from collective.fit_options import NOT_EQUAL
from collective.streams import is_terminal
from collective.training.sweep.runner import Trained, fit_many

KEYS = {
    "base": dict,
    "grid": dict,
    "trainings": list,
    "at_once": int,
    "ranks": int,
    "folder": str,
}


def read(path: str) -> dict[str, Any]:
    """Reads a sweep file; returns the arguments of ``fit_many``."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        first = str(error).replace("\n", " ")
        raise UsageError(
            f"{path} cannot be read: {first}", hint="--sweep FILE, in YAML"
        ) from None
    if not isinstance(content, dict) or not content:
        raise UsageError(
            f"{path} has no keys", hint=f"keys of a sweep: {', '.join(KEYS)}"
        )
    for key, value in content.items():
        if key not in KEYS:
            raise UsageError(
                f"{path}: unknown key {key!r}",
                hint=f"keys of a sweep: {', '.join(KEYS)}; common options go under base",
            )
        if type(value) is not KEYS[key]:
            raise UsageError(
                f"{path}: {key} is {value!r}, not a {KEYS[key].__name__}",
                hint="see docs/how-to/sweeps.md",
            )
    grid = content.get("grid", {})
    lists = [v if isinstance(v, list) else [v] for v in grid.values()]
    combined = [
        dict(zip(grid, values, strict=True)) for values in itertools.product(*lists)
    ]
    trainings = [*(combined if grid else []), *content.get("trainings", [])]
    if not trainings or not all(isinstance(t, dict) for t in trainings):
        raise UsageError(
            f"{path} names no trainings, or one without options",
            hint="grid: {seed: [0, 1]}, or trainings: [{seed: 0}, {seed: 1}]",
        )
    return {
        "trainings": [
            content.get("base", {}) | {"name": _name(t)} | t for t in trainings
        ],
        "folder": content.get("folder", str(Path(path).with_suffix("")) + "-sweep"),
        "at_once": content.get("at_once"),
        "ranks": content.get("ranks", 1),
    }


def _name(options: Mapping[str, Any]) -> str:
    """Returns a file name made of the options that differ between trainings."""
    text = "-".join(f"{key}-{value}" for key, value in options.items())
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)


def run(path: str) -> int:
    """Trains, prints a table, plots losses; returns 1 if a training failed, else 0."""
    arguments = read(path)
    trained = fit_many(**arguments)
    Console(highlight=False, force_terminal=None if is_terminal() else False).print(
        table(trained)
    )
    for t in trained:
        if t.failure:
            print(f"{t.name} failed: {t.failure}")
    picture = Path(arguments["folder"], "losses.png")
    print(f"{picture if plot(trained, picture) else 'no plot: pip install matplotlib'}")
    return int(any(t.failure for t in trained))


def table(trained: Sequence[Trained]) -> Table:
    """Returns a table of name, last loss, test metrics and speed of each training."""
    summaries = [t.summary for t in trained if t.summary]
    metrics = list(dict.fromkeys(name for s in summaries for name in s["test"]))
    shown = Table(box=None, pad_edge=False)
    columns = ["training", "last loss", *(f"test {n}" for n in metrics), "samples/s"]
    for i, column in enumerate(columns):
        shown.add_column(column, justify="right" if i else "left", overflow="fold")
    for t in trained:
        if t.summary is None:
            shown.add_row(t.name, "failed")
            continue
        numbers = [
            t.summary["losses"][-1] if t.summary["losses"] else None,
            *(t.summary["test"].get(n) for n in metrics),
        ]
        hooked = t.summary.get("not_equal_to_one_process")
        shown.add_row(
            f"{t.name} ({NOT_EQUAL})" if hooked else t.name,
            *("" if n is None else f"{n:.4f}" for n in numbers),
            f"{t.summary['samples_per_second']:,.0f}",
        )
    return shown


def plot(trained: Sequence[Trained], path: Path) -> bool:
    """Plots the loss of every step; returns False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for t in trained:
        if t.summary is not None:
            losses = [float("nan") if v is None else v for v in t.summary["losses"]]
            axes.plot(losses, lw=1, label=t.name)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    if axes.get_lines():
        axes.legend(fontsize="small")
    figure.savefig(path)
    plt.close(figure)
    return True
