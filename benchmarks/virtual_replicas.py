"""What virtual replicas cost: as many as ranks, beside the same training without.

    python benchmarks/virtual_replicas.py
    python benchmarks/virtual_replicas.py --model resnet50 --steps 30 --batch 16 \
        --data synthetic:64x64x3:10

Trainings take turns, on the backend ``native`` with one thread an operation. Printed are
milliseconds: the median of all steps but the first two, and the all-reduce's share of the
mean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import numpy as np


def main() -> None:
    """Prints a line for each training, and the ratio of the means of each kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    kinds = {"plain": [], "virtual": ["--virtual-replicas", str(options.ranks)]}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind, more in kinds.items():
            step, all_reduce = train(options, more)
            found[kind].append((step, all_reduce))
            print(f"{kind:8} step {step:8.2f}  all-reduce {all_reduce:7.2f}")
    plain, virtual = (np.mean(found[kind], axis=0) for kind in kinds)
    print("ratio    step {:8.2f}  all-reduce {:7.2f}".format(*virtual / plain))


def train(options: argparse.Namespace, more: list[str]) -> tuple[float, float]:
    """Milliseconds of a step, and of its all-reduce."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "run.json")
        subprocess.run(
            [
                *(*common.LAUNCH, str(options.ranks), sys.executable),
                *(str(common.ROOT / "train.py"), "--backend", "native"),
                *("--model", options.model, "--data", options.data, "--threads", "1"),
                *("--steps", str(options.steps)),
                *("--global-batch-size", str(options.batch), "--json", str(written)),
                *more,
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        run = json.loads(written.read_text())
    step = float(np.median(run["step_seconds"][2:]))
    return 1e3 * step, 1e3 * run["seconds_per_step"]["all_reduce"]


if __name__ == "__main__":
    main()
