"""Measures the memory of a model whose weights or optimizer are divided among ranks.

    python benchmarks/memory.py shard-optimizer -np 2
    python benchmarks/memory.py tensor-parallel -np 2
    python benchmarks/memory.py model-parallel -np 2

Models that consist mainly of weights train three steps with Adam, without the option and with
it: four layers of 4096 x 4096, or an embedding of 65536 rows of 512 and two pairs of layers,
512 to 16384 to 512. The output has the bytes of weights and optimizer on each rank or device,
from the variables themselves; and for ranks the largest peak of resident memory, as the
operating system counts it. Without GPUs the devices are logical CPU devices, which share one
memory.
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
    """Start a process, or ranks, without the option and with it."""
    p = workloads.parser(__doc__)
    p.add_argument(
        "what", choices=("shard-optimizer", "tensor-parallel", "model-parallel")
    )
    p.add_argument("-np", type=int, default=2, help="ranks, or devices")
    p.add_argument("--child", type=int, metavar="N", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        train(args.what, args.child)
        return
    launch = [] if args.what == "model-parallel" else [*workloads.LAUNCH, str(args.np)]
    for given in (1, args.np):
        command = [*launch, sys.executable, __file__, args.what, "--child", str(given)]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        printed = out.stdout.splitlines()[-1].removeprefix("[0] ")
        print(f"--{args.what} {given}: {printed}", flush=True)


def train(what: str, count: int) -> None:
    """Train; on rank 0, print the bytes on each rank or device.

    Args:
        what: The option.
        count: Number of ranks or devices; 1 for training without the option.
    """
    with quiet():
        from collective import backends
        from collective.training import fit
        from collective.training.keras_compat.held_parts import holder_of
        from collective.training.process.object_collectives import gather

        shards = what == "shard-optimizer"
        options = {} if shards else {what.replace("-", "_"): count}
        name = "single" if what == "model-parallel" else "native"
        backend = backends.get(name, backends.Options(**options))
    make, data = dense() if shards else embedding()
    model = fit(
        make, *data, backend=backend, batch_size=ROWS, steps=3, verbose=0,
        shard_optimizer=shards and count > 1,
    ).model  # fmt: skip
    held: dict[str, np.ndarray] = {}
    for kind, variables in enumerate((model.variables, model.optimizer.variables)):
        for variable in variables:
            holder = holder_of(variable)
            own = variable.value if holder is None else holder.part
            device = own.device.rpartition("device:")[2]
            held.setdefault(device, np.zeros(2))[kind] += np.asarray(own).nbytes
    most = ""
    if name == "native":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        of_ranks = gather(backend, [*sum(held.values()), peak])
        held = {f"rank {r}": sizes[:2] for r, sizes in enumerate(of_ranks)}
        most = f"; peak of a process {of_ranks[:, 2].max() / MIB:.0f} MiB"
    if backend.rank == 0:
        each = (
            f"{weights / MIB:.1f} MiB of weights and {optimizer / MIB:.1f} of "
            f"optimizer on {place}"
            for place, (weights, optimizer) in held.items()
        )
        print(f"{', '.join(each)}{most}")


def dense() -> tuple[Any, tuple[np.ndarray, ...]]:
    """Return a compiled model of four layers, and data."""
    import keras

    layers = [keras.layers.Dense(4096, "tanh") for _ in range(4)]
    model = keras.Sequential([keras.Input((4096,)), *layers])
    model.compile("adam", "mse")
    rows = np.random.default_rng(0).normal(size=(2, ROWS, 4096)).astype("float32")
    return model, tuple(rows)


def embedding() -> tuple[Any, tuple[np.ndarray, ...]]:
    """Return a function that makes the model of parallel layers, and data."""

    def make() -> Any:
        import keras

        from collective.training import parallel

        layers = [keras.Input((LENGTH,), dtype="int32")]
        layers.append(parallel.ShardedEmbedding(WORDS, WIDTH))
        for _ in range(2):
            wide = parallel.ColumnParallelDense(32 * WIDTH, gather_output=False)
            layers += [wide, parallel.RowParallelDense(WIDTH, input_is_parallel=True)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
        return model

    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (ROWS, LENGTH)).astype("int32")
    return make, (x, rng.normal(size=(ROWS, LENGTH, WIDTH)).astype("float32"))


if __name__ == "__main__":
    main()
