"""Measures the effect of an option of ``train.py`` on time and memory; trainings take turns.

    python benchmarks/options.py --with "" --with "--virtual-replicas 2" --threads 1
    python benchmarks/options.py --with "--bucket-bytes 1000000000" \
        --with "--bucket-bytes 4194304" --model resnet50 --data synthetic:64x64x3:10 \
        --launch "python -m tests.hosts.lab --hosts 2 --slots 1 --rate 1gbit"
    python benchmarks/options.py --launch "horovodrun -np 2" --backend horovod ...
    python benchmarks/options.py --launch "" --backend single --steps 5 --rounds 1 \
        --with "" --with "--accumulate 4" --model benchmarks.workloads:transformer \
        --data synthetic:256x64x1:10

All other options are the same for each training. The output has milliseconds: the median of
the steps of all rounds without the first two of each training, the lowest and highest median
of a round, and the all-reduce's share of the mean; and the peak of the resident memory of rank
0, most of which TensorFlow alone takes in a small training.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import workloads


def main() -> None:
    """Run the rounds and print a line for each kind of training."""
    parser = workloads.parser(__doc__)
    add = parser.add_argument
    add("--with", dest="kinds", action="append", required=True, metavar="OPTIONS",
        help="of one kind of training; may be repeated")  # fmt: skip
    add(
        "--launch",
        default=[*workloads.LAUNCH, "2"],
        type=shlex.split,
        metavar="COMMAND",
    )
    add("--backend", default="native")
    add("--steps", default="300")
    add("--rounds", type=int, default=3)
    options, more = parser.parse_known_args()
    more += ["--backend", options.backend, "--steps", options.steps]
    trainings = {
        kind: partial(train, options.launch, [*more, *shlex.split(kind)])
        for kind in options.kinds
    }
    found = workloads.take_turns(trainings, options.rounds)
    print(
        f"{'step':>8} {'lowest':>8} {'highest':>8} {'all-reduce':>10} {'peak MiB':>8}"
    )
    for kind, runs in found.items():
        steps = [1e3 * np.array(run["step_seconds"][2:]) for run in runs]
        rounds = [np.median(each) for each in steps]
        summed = 1e3 * np.mean([r["seconds_per_step"]["all_reduce"] for r in runs])
        peak = max(run["peak_memory"] for run in runs) / 2**20
        print(f"{np.median(np.concatenate(steps)):8.2f} {min(rounds):8.2f} "
              f"{max(rounds):8.2f} {summed:10.2f} {peak:8.0f}  "
              f"{kind or 'without'}")  # fmt: skip


def train(launch: list[str], options: list[str]) -> dict:
    """Return the record of ``train.py --json``."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "run.json")
        program = [sys.executable, str(workloads.ROOT / "train.py"), "--verbose", "0"]
        command = [*launch, *program, *options, "--json", str(written)]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, cwd=workloads.ROOT
        )
        return json.loads(written.read_text())


if __name__ == "__main__":
    main()
