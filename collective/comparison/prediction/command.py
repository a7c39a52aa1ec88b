"""``compare.py --predict``: tables, a picture and a JSON file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from collective.comparison import tables
from collective.comparison.command import make_folder, show, writing
from collective.comparison.prediction.cluster import Asked, parse
from collective.comparison.prediction.models import (
    PUBLISHED,
    Profile,
    of_model,
    published,
)
from collective.comparison.prediction.simulator import Cluster
from collective.comparison.prediction.step import POLICIES, Predicted, predict
from collective.errors import UsageError

Found = dict[str, dict[int, Predicted]]  # by backend and number of ranks
SHAPE, CLASSES = (224, 224, 3), 1000


def predict_all(asked: Asked, profile: Profile) -> Found:
    """Predicts every backend on the cluster, and on smaller ones of the same kind."""
    cluster = asked.cluster
    counts = {cluster.hosts} | {2**i for i in range(1, 17) if 2**i < cluster.hosts}
    clusters = [dataclasses.replace(cluster, hosts=n) for n in sorted(counts)]
    return {
        name: {c.size: predict(profile, c, policy, asked.gpu) for c in clusters}
        for name, policy in POLICIES.items()
    }


def profile_of(rest: Sequence[str], asked: Asked) -> Profile:
    """The model of the options of ``train.py``: ``--model`` and ``--data synthetic:``."""
    options = dict(zip(rest[::2], rest[1::2], strict=False))
    unknown = set(options) - {"--model", "--data"}
    if unknown or len(rest) % 2:
        raise UsageError(
            f"--predict takes --model and --data, not {' '.join(rest)}",
            hint="--predict ... --model resnet50",
        )
    name = options.get("--model", "resnet50")
    if name in PUBLISHED and "--data" not in options:
        return published(name, asked.seconds)
    from collective.training import models

    shape, classes = _rows(options.get("--data"))
    model = models.build(name, input_shape=shape, classes=classes)
    return of_model(name, model, asked.rows, asked.seconds)


def _rows(data: str | None) -> tuple[tuple[int, ...], int]:
    if data is None:
        return SHAPE, CLASSES
    found = re.fullmatch(r"synthetic:(\d+(?:x\d+)*)(?::(\d+))?", data)
    if not found:
        raise UsageError(
            f"--predict reads no data, and cannot know the rows of {data}",
            hint="--data synthetic:224x224x3:1000",
        )
    return tuple(map(int, found[1].split("x"))), int(found[2] or CLASSES)


def tables_of(asked: Asked, profile: Profile, found: Found) -> list[tables.Table]:
    """The backends on the whole cluster; their efficiency over the number of ranks."""
    whole = asked.cluster.size
    where = _words(asked.cluster)
    columns = ["backend", "step, ms", "efficiency", "sums, ms", "wire, ms", "bound"]
    first = tables.Table(f"Predicted, not measured: {profile.name} on {where}", columns)
    for name, steps in sorted(found.items(), key=lambda one: one[1][whole].step):
        one = steps[whole]
        times = (f"{1e3 * seconds:.1f}" for seconds in (one.step, one.sums, one.wire))
        step, sums, wire = times
        first.add("", name, step, f"{one.efficiency:.3f}", sums, wire, one.bound)
    first.sentences += [
        f"One device takes {1e3 * profile.seconds:.1f} ms a step ({profile.source}); "
        f"gradients have {profile.bytes / 1e6:.1f} MB.",
        "An upper bound: ranks are equally fast, and nothing else uses the network "
        "(docs/explanation/scaling.md).",
        *(f"{name}: {policy.note}." for name, policy in POLICIES.items()),
    ]
    counts = sorted(found["native"])
    second = tables.Table("Efficiency by ranks", ["backend", *map(str, counts)])
    for name, steps in found.items():
        second.add("", name, *(f"{steps[n].efficiency:.3f}" for n in counts))
    return [first, second]


def _words(cluster: Cluster) -> str:
    wire = cluster.wire
    return (
        f"{cluster.hosts} hosts of {cluster.slots}, {wire.bytes_per_second * 8e-9:g} Gb/s, "
        f"{1e6 * wire.latency:g} us"
    )


def draw(profile: Profile, found: Found, file: Path) -> None:
    """Draws the efficiency over the number of ranks."""
    import matplotlib.pyplot as plt

    from collective.comparison.figures import STYLE, color

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots()
        for name, steps in found.items():
            efficiencies = [one.efficiency for one in steps.values()]
            axes.plot([*steps], efficiencies, "o-", color=color(name), label=name)
        axes.set(xlabel="ranks", ylabel="predicted efficiency", title=profile.name)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.02)
        axes.legend(fontsize=8)
        figure.savefig(file, dpi=130)
        plt.close(figure)


def predict_to(folder: Path, asked: Asked, profile: Profile, found: Found) -> None:
    """Writes ``prediction.json`` and ``prediction.png``."""
    rows = [
        {
            "backend": name,
            "ranks": ranks,
            "seconds_per_step": one.step,
            "efficiency": one.efficiency,
            "bound": one.bound,
            "seconds_of_sums": one.sums,
            "seconds_of_wire": one.wire,
        }
        for name, steps in found.items()
        for ranks, one in steps.items()
    ]
    about = {
        "model": profile.name,
        "gradient_bytes": profile.bytes,
        "seconds_of_one_device": profile.seconds,
        "source": profile.source,
        "cluster": dataclasses.asdict(asked.cluster),
        "predictions": rows,
    }
    with writing(folder):
        text = json.dumps(about, indent=1) + "\n"
        (folder / "prediction.json").write_text(text)
        draw(profile, found, folder / "prediction.png")


def predict_command(words: str, rest: Sequence[str], folder: Path) -> int:
    """Predicts, prints and writes; returns 0.

    Raises:
        UsageError: If the cluster, the model or the folder is invalid.
    """
    asked = parse(words)
    profile = profile_of(rest, asked)
    make_folder(folder)
    found = predict_all(asked, profile)
    console = Console(highlight=False, markup=False, emoji=False)
    for table in tables_of(asked, profile, found):
        show(table, console)
    predict_to(folder, asked, profile, found)
    console.print(f"\nWritten: {folder / 'prediction.json'} and prediction.png")
    return 0
