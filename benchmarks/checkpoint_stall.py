"""What --checkpoint-every 10 costs the steps.

    python benchmarks/checkpoint_stall.py resnet50

One training; forty steps with a checkpoint due every ten, of which some are left out where
they would take more than 5 % of the time, forty steps with none, and so on. The ratio of
their wall time is taken pair by pair, everything between two steps included. The first
pair is left out. ``--all`` leaves out no checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from collective import backends
from collective.backends.quiet import quiet

EVERY, BLOCK = 10, 40
# Shape of a row, classes, batch size.
SIZES = {
    "resnet50": ((64, 64, 3), 10, 16),
    "transformer": ((28, 28, 1), 10, 64),
}


def main() -> None:
    """Runs the pairs and prints medians and their ratio."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", choices=SIZES, nargs="?", default="resnet50")
    p.add_argument("--pairs", type=int, default=2)
    p.add_argument("--all", action="store_true", help="leave out no checkpoint")
    args = p.parse_args()
    with quiet():
        backend = backends.get("single")
        import keras

        from collective import training
        from collective.training import models

    class Alternating(training.Checkpoint):
        """Is due in every second block of steps; notes when each block has ended."""

        def due(self, step: int, epoch_ended: bool) -> bool:
            if step % BLOCK == 0:
                self.ended.append(time.perf_counter())
            if args.all:
                self._not_before = 0.0
            due = step // BLOCK % 2 == 1 and step % EVERY == 0
            self.due_count += due
            return due

    shape, classes, batch = SIZES[args.model]
    steps = 2 * BLOCK * (args.pairs + 1) + BLOCK + 1
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * batch, *shape)).astype(np.float32)
    y = rng.integers(0, classes, len(x)).astype(np.int32)

    def make() -> keras.Model:
        model = models.build(args.model, input_shape=shape, classes=classes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
        return model

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Alternating(folder)
        checkpoint.ended, checkpoint.due_count = [], 0
        training.fit(
            make, (x, y), backend=backend, global_batch_size=batch,
            checkpoint=checkpoint, verbose=0,
        )  # fmt: skip
        written = int(checkpoint.due_count - checkpoint._left_out)
        last = max(Path(folder).iterdir())
        size = sum(f.stat().st_size for f in last.iterdir())
    blocks = np.diff(checkpoint.ended)  # with, without, with, ...
    with_it, without = blocks[2::2], blocks[3::2]
    ratios = with_it[: len(without)] / without
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    print(
        f"{args.model}, batch {batch}, checkpoints of {size / 1e6:.0f} MB: {written} of "
        f"{checkpoint.due_count} that were due"
    )
    print(f"  without  {1e3 * np.median(without) / BLOCK:8.1f} ms a step (median)")
    print(f"  with     {1e3 * np.median(with_it) / BLOCK:8.1f} ms a step (median)")
    print(f"  ratio    {middle:8.3f} (quartiles {low:.3f} to {high:.3f}, ", end="")
    print(f"{len(ratios)} pairs)")


if __name__ == "__main__":
    main()
