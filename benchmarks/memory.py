"""Peak memory of a training with and without what saves memory.

    python benchmarks/memory.py accumulate                # against one micro-batch
    python benchmarks/memory.py recompute transformer     # and with --accumulate
    python benchmarks/memory.py shard-optimizer -np 2
    python benchmarks/memory.py tensor-parallel -np 2
    python benchmarks/memory.py model-parallel -np 2

Each setting trains three steps in a process, or in ranks, of its own, for a process'
peak never falls. It is that of the resident memory, as the operating system counts
it; what TensorFlow takes before the model is shown, too. The first two train
ResNet-50 on images of 128x128, or a transformer of 8 blocks on sequences of 256
vectors. The last three train models that are little but weights, with Adam, and also
count the bytes of weights and optimizer on each rank or device, from the variables
themselves: four layers of 4096 x 4096, or an embedding of 65536 rows of 512 and two
pairs of layers, 512 to 16384 to 512. Devices are logical CPU devices where there are
no GPUs: what runs on each has one memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
from typing import Any

import numpy as np

from collective.backends.quiet import quiet

MIB = 1 << 20
DATA = {"resnet50": "synthetic:128x128x3:10", "transformer": "synthetic:256x64x1:10"}
# Rows of the batch, and micro-batches of it.
SIZES = {"accumulate": (64, 8), "recompute": (32, 4)}
SHARING = ("shard-optimizer", "tensor-parallel", "model-parallel")
ROWS, LENGTH, WORDS, WIDTH = 4, 8, 65536, 512


def main() -> None:
    """Starts a process, or ranks, for each setting."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=(*SIZES, *SHARING))
    p.add_argument("model", choices=DATA, nargs="?", default="resnet50")
    p.add_argument("--rows", type=int, help="of the batch")
    p.add_argument("--accumulate", type=int, help="micro-batches of the batch")
    p.add_argument("-np", type=int, default=2, help="ranks, or devices")
    p.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child is not None:
        child = train_alone if args.what in SIZES else train_sharing
        child(**args.child)
    elif args.what in SIZES:
        compare_steps(args)
    else:
        compare_sharing(args.what, args.np)


def started(what: str, launcher: list[str], options: dict[str, Any]) -> str:
    """The last line that this program prints as a child."""
    command = [*launcher, sys.executable, __file__, what, "--child"]
    command.append(json.dumps(options))
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return out.stdout.splitlines()[-1].removeprefix("[0] ")


def peak() -> float:
    """Peak resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def compare_steps(args: argparse.Namespace) -> None:
    """Prints a line for each setting of one process."""
    rows, parts = (
        given or default
        for given, default in zip(
            (args.rows, args.accumulate), SIZES[args.what], strict=True
        )
    )
    mine = args.model == "transformer"
    settings = [(rows, *more) for more in itertools.product((1, parts), (False, True))]
    if args.what == "accumulate":
        settings = [(rows // parts, 1, False), (rows, parts, False), (rows, 1, False)]
    first = None
    for batch, accumulate, recompute in settings:
        options = {
            "model": "memory:transformer" if mine else args.model,
            "data": DATA[args.model],
            "global_batch_size": batch,
            "accumulate": accumulate,
            "recompute": recompute,
        }
        printed = started(args.what, [], options)
        before, after, seconds = map(float, printed.split())
        first = first or after
        print(
            f"batch {batch:3}, --accumulate {accumulate}"
            f"{' --recompute' if recompute else '':12}: peak {after:.0f} MiB "
            f"({after / first:.2f} of the first; TensorFlow alone {before:.0f}), "
            f"{seconds:.1f} s a step",
            flush=True,
        )


def train_alone(**options: Any) -> None:
    """Trains; prints MiB before the model and after, and the fastest step's seconds."""
    with quiet():
        from collective.training import command
    before = peak()
    job = command.Job(backend="single", steps=3, verbose=0, test=False, **options)
    print(before, peak(), min(command.run(job).step_seconds[1:]))


def transformer(input_shape: tuple[int, ...], classes: int) -> Any:
    """One of 8 blocks, of width 256."""
    from collective.training.models import transformer

    return transformer(input_shape, classes, blocks=8, width=256, heads=8)


def compare_sharing(what: str, count: int) -> None:
    """Prints a line without the option and one with it."""
    for given in (1, count):
        ranks = [sys.executable, "-m", "collective.launch", "-np", str(count)]
        launcher = [] if what == "model-parallel" else ranks
        printed = started(what, launcher, {"what": what, "count": given})
        print(f"--{what} {given}: {printed}", flush=True)


def train_sharing(what: str, count: int) -> None:
    """Trains; rank 0 prints what each rank or device held.

    Args:
        what: One of ``SHARING``.
        count: Among how many ranks or devices; 1 for none of it.
    """
    with quiet():
        from collective import backends
        from collective.training import fit
        from collective.training.exchange import gather

        shards = what == "shard-optimizer"
        options = {} if shards else {what.replace("-", "_"): count}
        name = "single" if what == "model-parallel" else "native"
        backend = backends.get(name, backends.Options(**options))
    make, data = dense() if shards else embedding()
    model = fit(
        make, data, backend=backend, global_batch_size=ROWS, steps=3, verbose=0,
        shard_optimizer=shards and count > 1,
    ).model  # fmt: skip
    held: dict[str, np.ndarray] = {}
    for kind, variables in enumerate((model.variables, model.optimizer.variables)):
        for variable in variables:
            device = variable.value.device.rpartition("device:")[2]
            held.setdefault(device, np.zeros(2))[kind] += np.asarray(variable).nbytes
    most = ""
    if name == "native":
        of_ranks = gather(backend, [*sum(held.values()), peak()])
        held = {f"rank {r}": sizes[:2] for r, sizes in enumerate(of_ranks)}
        most = f"; peak of a process {of_ranks[:, 2].max():.0f} MiB"
    if backend.rank == 0:
        each = (
            f"{weights / MIB:.1f} MiB of weights and {optimizer / MIB:.1f} of "
            f"optimizer on {place}"
            for place, (weights, optimizer) in held.items()
        )
        print(f"{', '.join(each)}{most}")


def dense() -> tuple[Any, tuple[np.ndarray, ...]]:
    """Four layers, compiled, and data."""
    import keras

    layers = [keras.layers.Dense(4096, "tanh") for _ in range(4)]
    model = keras.Sequential([keras.Input((4096,)), *layers])
    model.compile("adam", "mse")
    rows = np.random.default_rng(0).normal(size=(2, ROWS, 4096)).astype("float32")
    return model, tuple(rows)


def embedding() -> tuple[Any, tuple[np.ndarray, ...]]:
    """What makes the model of parallel layers, and data."""

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
