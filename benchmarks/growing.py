"""Measures the pause when a job grows to another host of the lab (tests/hosts/lab.py).

    python benchmarks/growing.py --runs 5

The runs take turns: with a next generation that is prepared during the training, and with
``--no-overlap``. The pause lasts from the end of the last step on one host to the end of the
first step on two; the output also has the number of steps until then. The training is
tests/hosts/ranks_overlapping.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from workloads import ROOT

sys.path.insert(0, str(ROOT))
from tests import launch
from tests.hosts import lab
from tests.hosts.ranks_overlapping import ANNOUNCED_AT
from tests.hosts.ranks_renewed import announce


def main() -> None:
    """Make all runs; print a line for each, and the median of each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of each way")
    parser.add_argument("--from", type=int, default=1, dest="first", help="hosts")
    args = parser.parse_args()
    pauses: dict[str, list[float]] = {"overlap": [], "no-overlap": []}
    with lab.hosts(args.first + 1, "10gbit") as hosts:
        for _ in range(args.runs):
            for way, found in pauses.items():
                pause, steps = run(hosts, args.first, way)
                found.append(pause)
                print(f"{way}: {pause:.2f} s; {steps} steps meanwhile", flush=True)
    for way, found in pauses.items():
        print(f"{way}: median {statistics.median(found):.2f} s")


def run(hosts: lab.Lab, first: int, way: str) -> tuple[float, int]:
    """Return the pause in seconds, and the steps between the host's arrival and the pause."""
    places = [f"{lab.NETWORK}.{number + 1}:1" for number in range(first + 1)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        announce(folder, ",".join(places[:first]))
        words = ["--min-np", "1", "--max-np", "9"]
        words += ["--host-discovery-script", f"cat {folder / 'hosts'}"]
        words += ["--no-overlap"] if way == "no-overlap" else []
        program = [str(ROOT / "tests/hosts/ranks_overlapping.py"), "hands over", name]
        command = [*words, sys.executable, *program, ",".join(places)]
        whole = hosts.ours("collective.launch", *command)
        code, printed = launch.run(whole, launch.environment(), 300)
        if code:
            sys.exit(printed)
        lines = (folder / "steps").read_text().splitlines()
        steps = [(int(g), float(t)) for _, g, t in map(str.split, lines)]
    began = next(i for i, (generation, _) in enumerate(steps) if generation)
    return steps[began][1] - steps[began - 1][1], began - ANNOUNCED_AT


if __name__ == "__main__":
    main()
