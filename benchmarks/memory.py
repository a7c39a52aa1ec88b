"""Measures the memory of a model whose weights or optimizer are divided among ranks.

    python benchmarks/memory.py shard-optimizer -np 2
    python benchmarks/memory.py tensor-parallel -np 2

Models that consist mainly of weights train three steps with Adam, without the option and with
it: four layers of 4096 x 4096, or an embedding of 65536 rows of 512 and two pairs of layers,
512 to 16384 to 512. The output has the bytes of weights and optimizer on each rank, from the
variables themselves, and the largest peak of resident memory, as the operating system counts
it.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from typing import Any

import numpy as np
import workloads

from collective.backends.quiet import quiet

MIB = 1 << 20
ROWS, LENGTH, WORDS, WIDTH = 4, 8, 65536, 512


def main() -> None:
    """Start ranks without the option and with it."""
    p = workloads.parser(__doc__)
    p.add_argument("what", choices=("shard-optimizer", "tensor-parallel"))
    p.add_argument("-np", type=int, default=2, help="ranks")
    p.add_argument("--child", type=int, metavar="N", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        train(args.what, args.child)
        return
    launch = [*workloads.LAUNCH, str(args.np)]
    for given in (1, args.np):
        command = [*launch, sys.executable, __file__, args.what, "--child", str(given)]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        printed = out.stdout.splitlines()[-1].removeprefix("[0] ")
        print(f"--{args.what} {given}: {printed}", flush=True)


def train(what: str, count: int) -> None:
    """Train; on rank 0, print the bytes on each rank.

    Args:
        what: The option.
        count: Number of ranks; 1 for training without the option.
    """
    with quiet():
        from collective import backends
        from collective.training import fit
        from collective.training.keras_compat.held_parts import holder_of
        from collective.training.process.object_collectives import gather

        shards = what == "shard-optimizer"
        options = backends.Options(tensor_parallel=1 if shards else count)
        backend = backends.get("native", options)
    make, data = dense() if shards else embedding()
    model = fit(
        make, *data, backend=backend, batch_size=ROWS, steps=3, verbose=0,
        shard_optimizer=shards and count > 1,
    ).model  # fmt: skip
    held = np.zeros(2)
    for kind, variables in enumerate((model.variables, model.optimizer.variables)):
        for variable in variables:
            holder = holder_of(variable)
            own = variable.value if holder is None else holder.part
            held[kind] += np.asarray(own).nbytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    of_ranks = gather(backend, [*held, peak])
    if backend.rank == 0:
        each = (
            f"{weights / MIB:.1f} MiB of weights and {optimizer / MIB:.1f} of "
            f"optimizer on rank {rank}"
            for rank, (weights, optimizer, _) in enumerate(of_ranks)
        )
        most = of_ranks[:, 2].max() / MIB
        print(f"{', '.join(each)}; peak of a process {most:.0f} MiB")


def dense() -> tuple[Any, tuple[np.ndarray, ...]]:
    """Return a compiled model of four layers, and data."""
    import keras

    layers = [keras.layers.Dense(4096, "tanh") for _ in range(4)]
    model = keras.Sequential([keras.Input((4096,)), *layers])
    model.compile("adam", "mse")
    rows = np.random.default_rng(0).normal(size=(2, ROWS, 4096)).astype("float32")
    return model, tuple(rows)


def embedding() -> tuple[Any, tuple[np.ndarray, ...]]:
    """Return a function that makes the model of an embedding and pairs of layers, and data."""

    def make() -> Any:
        import keras

        layers = [keras.Input((LENGTH,), dtype="int32")]
        layers.append(keras.layers.Embedding(WORDS, WIDTH))
        for _ in range(2):
            layers += [keras.layers.Dense(32 * WIDTH), keras.layers.Dense(WIDTH)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
        return model

    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (ROWS, LENGTH)).astype("int32")
    return make, (x, rng.normal(size=(ROWS, LENGTH, WIDTH)).astype("float32"))


if __name__ == "__main__":
    main()
