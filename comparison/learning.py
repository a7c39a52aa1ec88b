"""What a training has learned by when: ``python -m comparison.learning FILE ...``.

The other arguments are those of ``train.py``. Rank 0 writes JSON: lists with one entry
for each epoch (``samples``: rows trained on so far; ``loss`` and, where there is one,
``accuracy``: over the epoch), and ``test``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import train
from collective.errors import exit_code
from training import datasets, job


def main(arguments: list[str]) -> int:
    """Trains, and writes on rank 0."""
    path, *rest = arguments
    work = job.Job.of(vars(train.parser().parse_args(rest)))
    summary = job.run(work)
    rows = len(datasets.load(work.data, seed=work.seed).train)
    size = work.global_batch_size
    per_epoch = -(-rows // size)
    samples = []
    for epoch in range(len(summary.history["loss"])):
        steps = min(summary.steps - epoch * per_epoch, per_epoch)
        samples.append(epoch * rows + min(steps * size, rows))
    told = {
        "samples": samples,
        "loss": summary.history["loss"],
        "accuracy": summary.history.get("accuracy", []),
        "test": summary.test,
    }
    Path(path).write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
