"""Measures the gain of a second process: one core alone, two trainings apart, two together.

    python benchmarks/scaling.py --model resnet50 --data synthetic:64x64x3:10 --rows 32

Each process has one core and ``--rows`` rows a step. ``alone`` is one process while the other
core rests. ``apart`` is two processes that do not communicate: it shows the loss that is due
to the machine, because cores share memory and clock. ``native`` is two processes that train
one model. The three take turns; only rates of one round are compared with each other.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import workloads

TRAIN = workloads.ROOT / "train.py"


def rates(commands: list[list[str]], options: list[str]) -> float:
    """Return samples per second of all commands, which run at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{i}.json") for i in range(len(commands))]
        running = [
            subprocess.Popen(
                [*command, str(TRAIN), *options, "--json", str(file)],
                stdout=subprocess.DEVNULL,
            )
            for command, file in zip(commands, files, strict=True)
        ]
        if any([process.wait() for process in running]):
            sys.exit("a training failed: see above")
        return sum(json.loads(f.read_text())["samples_per_second"] for f in files)


def main() -> None:
    """Run the rounds and print medians and shares of twice one core."""
    parser = workloads.parser(__doc__)
    parser.add_argument("--rows", type=int, default=32, help="of each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options, more = parser.parse_known_args()
    more += ["--verbose", "0", "--steps", str(options.steps), "--global-batch-size"]
    first, second = sorted(os.sched_getaffinity(0))[:2]

    def on(core: int) -> list[str]:
        return ["taskset", "-c", str(core), sys.executable]

    launch = [*workloads.LAUNCH, "2", sys.executable]
    single = [str(options.rows), "--backend", "single"]
    both = [str(2 * options.rows), "--backend", "native"]
    ways = {
        "alone": lambda: rates([on(first)], more + single),
        "apart": lambda: rates([on(first), on(second)], more + single),
        "native": lambda: rates([launch], more + both),
    }
    found = workloads.take_turns(ways, options.rounds)
    print(f"{'':>8} {'samples/s':>10} {'of twice alone':>15} {'of apart':>9}")
    for name, all_rates in found.items():
        twice, apart = (
            statistics.median(a / b for a, b in zip(all_rates, found[o], strict=True))
            for o in ("alone", "apart")
        )
        rate = statistics.median(all_rates)
        print(f"{name:>8} {rate:10.4g} {twice / 2:15.2f} {apart:9.2f}")


if __name__ == "__main__":
    main()
