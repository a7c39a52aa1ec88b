"""``make simulate``: the tables and the picture of docs/explanation/scaling.md.

python -m collective.comparison.prediction.scaling --output build/simulate
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from collective.comparison.prediction import simulator
from collective.comparison.prediction.models import PUBLISHED, Profile, published
from collective.comparison.prediction.simulator import Cluster, Wire
from collective.comparison.prediction.step import (
    FLAT_RING,
    POLICIES,
    Predicted,
    predict,
)

WAYS = {
    "ours": POLICIES["native"],
    "horovod": POLICIES["horovod"],
    "flat ring": FLAT_RING,
}
SLOTS = (8, 1)
WIRES = {
    (gigabits, micros): Wire(gigabits * 1e9 / 8, latency=micros * 1e-6)
    for gigabits in (25, 100)
    for micros in (5, 20)
}
# Published by Horovod for 128 hosts of 4 Pascal GPUs and 25 Gb/s (docs/benchmarks.rst).
ANCHOR, REPORTED = Cluster(128, 4, WIRES[25, 5]), {"resnet101": 0.90, "vgg16": 0.68}

Key = tuple[int, int, int, str, str, int]  # slots, Gb/s, us, model, way, ranks


def sweep(profiles: Iterable[Profile], ranks: Iterable[int]) -> dict[Key, Predicted]:
    """Predicts every combination."""
    profiles, found = list(profiles), {}
    for slots in SLOTS:
        for count in ranks:
            hosts = max(1, count // slots)
            for algorithm in {policy.algorithm for policy in WAYS.values()}:
                simulator.prepare(hosts, slots, [*WIRES.values()], algorithm)
            print(f"{hosts} hosts of {slots}", flush=True)
            for (gigabits, micros), wire in WIRES.items():
                cluster = Cluster(hosts, slots, wire)
                for profile in profiles:
                    for way, policy in WAYS.items():
                        key = (slots, gigabits, micros, profile.name, way, count)
                        found[key] = predict(profile, cluster, policy)
    return found


def markdown(found: dict[Key, Predicted]) -> str:
    """A table for each kind of cluster: efficiency and bound over the ranks."""
    counts = sorted({key[-1] for key in found})
    text = []
    for kind in dict.fromkeys(key[:3] for key in found):
        slots, gigabits, micros = kind
        each = "1 rank" if slots == 1 else f"{slots} ranks"
        text += [f"\n{each} a host, {gigabits} Gb/s, {micros} µs:\n"]
        text += [
            "| model | | " + " | ".join(map(str, counts)) + " | bound at the last |"
        ]
        text += ["|" + "---|" * (len(counts) + 3)]
        for model, way in dict.fromkeys((key[3], key[4]) for key in found):
            keys = [(*kind, model, way, count) for count in counts]
            row = [found[key] for key in keys]
            cells = [f"{one.efficiency:.2f}" for one in row]
            text += [f"| {model} | {way} | {' | '.join(cells)} | {row[-1].bound} |"]
    return "\n".join(text) + "\n"


def draw(found: dict[Key, Predicted], file: Path, micros: int = 5) -> None:
    """Efficiency over ranks: a panel for each model, 8 ranks a host."""
    import matplotlib.pyplot as plt

    from collective.comparison.figures import STYLE

    names = [*dict.fromkeys(key[3] for key in found)]
    counts = sorted({key[-1] for key in found})
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(names), sharey=True, figsize=(11, 3.2))
        for name, axes in zip(names, panels, strict=True):
            for i, way in enumerate(WAYS):
                for gigabits, style in ((100, "-"), (25, "--")):
                    keys = [(8, gigabits, micros, name, way, n) for n in counts]
                    rates = [found[key].efficiency for key in keys]
                    label = f"{way}, {gigabits} Gb/s"
                    axes.plot(counts, rates, style, color=f"C{i}", label=label)
            axes.set(title=name, xlabel="ranks")
            axes.set_xscale("log", base=2)
            axes.set_ylim(0, 1.02)
        panels[0].set_ylabel("predicted efficiency")
        panels[0].legend(fontsize=7)
        figure.savefig(file, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Runs the sweep; writes ``scaling.md``, ``scaling.json`` and ``scaling.svg``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("build/simulate"))
    parser.add_argument("--most", type=int, default=4096, help="ranks")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    profiles = {name: published(name) for name in PUBLISHED}
    ranks = [8 * 2**i for i in range(10) if 8 * 2**i <= options.most]
    found = sweep(profiles.values(), ranks)
    rows = [[*key, one.step, one.efficiency, one.bound] for key, one in found.items()]
    (options.output / "scaling.json").write_text(json.dumps(rows) + "\n")
    text = markdown(found)
    (options.output / "scaling.md").write_text(text)
    draw(found, options.output / "scaling.svg")
    print(text)
    for name, reported in REPORTED.items():
        one = predict(profiles[name], ANCHOR, POLICIES["horovod"])
        print(f"{name}, Horovod, 128 hosts of 4: {one.efficiency:.2f}; published "
              f"{reported:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
