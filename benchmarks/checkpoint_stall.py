"""Measures how much --checkpoint-every 10 delays the steps.

    python benchmarks/checkpoint_stall.py resnet50

It runs one training: forty steps with a checkpoint due every ten, of which those are left out
that would take more than 5 % of the time, then forty steps without, and so on. The ratio of
their wall time is taken pair by pair; it includes everything between two steps, and leaves
out the first pair. With ``--all`` no checkpoint is left out.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import workloads

from collective import backends
from collective.backends.quiet import quiet

EVERY, BLOCK = 10, 40
BATCHES = {"resnet50": 16, "transformer": 64}


def main() -> None:
    """Run the pairs and print medians and their ratio."""
    p = workloads.parser(__doc__)
    p.add_argument("model", choices=BATCHES, nargs="?", default="resnet50")
    p.add_argument("--pairs", type=int, default=2)
    p.add_argument("--all", action="store_true", help="leave out no checkpoint")
    args = p.parse_args()
    with quiet():
        backend = backends.get("single")
        import keras

        from collective import training

    class Alternating(training.Checkpoint):
        """Is due in every second block of steps; records the end of each block."""

        def due(self, step: int, epoch_ended: bool) -> bool:
            if step % BLOCK == 0:
                self.ended.append(time.perf_counter())
            if args.all:
                self._not_before = 0.0
            due = step // BLOCK % 2 == 1 and step % EVERY == 0
            self.due_count += due
            return due

    shape, batch = workloads.SHAPES[args.model], BATCHES[args.model]
    steps = 2 * BLOCK * (args.pairs + 1) + BLOCK + 1
    data = workloads.random_rows(steps * batch, shape)

    def make() -> keras.Model:
        adam = keras.optimizers.Adam(1e-4)
        return workloads.compiled(args.model, adam, shape, jit_compile=False)

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Alternating(folder)
        checkpoint.ended, checkpoint.due_count = [], 0
        training.fit(
            make, data, backend=backend, global_batch_size=batch,
            checkpoint=checkpoint, verbose=0,
        )  # fmt: skip
        written = int(checkpoint.due_count - checkpoint._left_out)
        last = max(Path(folder).iterdir())
        size = sum(f.stat().st_size for f in last.iterdir())
    blocks = np.diff(checkpoint.ended)  # with, without, with, ...
    with_it, without = blocks[2::2], blocks[3::2]
    print(
        f"{args.model}, batch {batch}, checkpoints of {size / 1e6:.0f} MB: {written} of "
        f"{checkpoint.due_count} that were due; {len(without)} pairs"
    )
    pairs = with_it[: len(without)], without
    workloads.print_pairs(("with", "without"), pairs, BLOCK)


if __name__ == "__main__":
    main()
