"""Memory of the optimizer, and of the process, with ``--shard-optimizer`` and without.

    python benchmarks/sharded_memory.py -np 2

Four layers of 4096 x 4096 weights and Adam, on 4 rows: weights are what there is. Bytes of
the optimizer's variables on a rank, and the largest peak resident memory of a rank as
the operating system counts it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import keras
import numpy as np
from peak import MIB, peak


def train(shard: bool) -> None:
    """Trains three steps; rank 0 prints bytes of the optimizer and of the process."""
    from collective.backends.quiet import quiet

    with quiet():
        from collective import backends
        from collective.training import fit
        from collective.training.exchange import gather

        backend = backends.get("native")
    layers = [keras.layers.Dense(4096, "tanh") for _ in range(4)]
    model = keras.Sequential([keras.Input((4096,)), *layers])
    model.compile("adam", "mse")
    rows = np.random.default_rng(0).normal(size=(2, 4, 4096)).astype("float32")
    result = fit(
        model,
        tuple(rows),
        backend=backend,
        global_batch_size=4,
        steps=3,
        shard_optimizer=shard,
        verbose=0,
    )
    held = sum(np.asarray(v).nbytes for v in result.model.optimizer.variables)
    peaks = gather(backend, peak())
    if backend.rank == 0:
        print(f"{held / MIB:.1f} {peaks.max():.0f}")


def main() -> None:
    """Starts the ranks twice."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-np", type=int, default=2, help="ranks")
    p.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child is not None:
        return train(bool(args.child))
    for shard in (0, 1):
        command = [sys.executable, "-m", "collective.launch", "-np", str(args.np)]
        command += [sys.executable, __file__, "--child", str(shard)]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        held, most = out.stdout.split()[-2:]
        print(
            f"{args.np} ranks{', --shard-optimizer' if shard else ''}: optimizer {held} "
            f"MiB on each, peak of a process {most} MiB",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
