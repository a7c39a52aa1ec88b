"""Memory of a large model with its layers in parts over ranks, or on several devices.

    python benchmarks/parallel_memory.py --tensor-parallel 2
    python benchmarks/parallel_memory.py --model-parallel 2

An embedding of 65536 rows of 512 and two pairs of layers, 512 to 16384 to 512, with Adam,
on 4 rows of 8 tokens: weights are what there is. Bytes of weights and optimizer on each
rank or device, from the variables themselves; and for ranks the largest peak resident
memory, as the operating system counts it. Devices are logical CPU devices where there
are no GPUs: they have one memory, so what runs on each cannot be distinguished.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import keras
import numpy as np
from peak import MIB, peak

ROWS, LENGTH, WORDS, WIDTH = 4, 8, 65536, 512


def model() -> keras.Model:
    """The model, compiled."""
    from collective.training.parallel import (
        ColumnParallelDense,
        RowParallelDense,
        ShardedEmbedding,
    )

    layers = [keras.Input((LENGTH,), dtype="int32"), ShardedEmbedding(WORDS, WIDTH)]
    for _ in range(2):
        layers.append(ColumnParallelDense(32 * WIDTH, gather_output=False))
        layers.append(RowParallelDense(WIDTH, input_is_parallel=True))
    made = keras.Sequential(layers)
    made.compile("adam", "mse")
    return made


def train(**options: int) -> None:
    """Trains three steps; rank 0 prints what each rank or device held."""
    from collective.backends.quiet import quiet

    with quiet():
        from collective import backends
        from collective.training import fit
        from collective.training.exchange import gather

        name = "native" if "tensor_parallel" in options else "single"
        backend = backends.get(name, backends.Options(**options))
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (ROWS, LENGTH)).astype("int32")
    y = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype("float32")
    result = fit(
        model, (x, y), backend=backend, global_batch_size=ROWS, steps=3, verbose=0
    )
    held: dict[str, float] = {}
    trained = result.model
    for variable in [*trained.variables, *trained.optimizer.variables]:
        device = variable.value.device.rpartition("device:")[2]
        size = np.asarray(variable).nbytes / MIB
        held[device] = held.get(device, 0) + size
    if name == "native":
        of_ranks = gather(backend, [sum(held.values()), peak()])
        held = {f"rank {r}": size for r, (size, _) in enumerate(of_ranks)}
        most = f"; peak of a process {of_ranks[:, 1].max():.0f}"
    if backend.rank == 0:
        each = ", ".join(f"{size:.1f} on {place}" for place, size in held.items())
        print(f"weights and optimizer, MiB: {each}{most if name == 'native' else ''}")


def main() -> None:
    """Starts a process, or the ranks, without the option and with it."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument("--tensor-parallel", type=int, metavar="T")
    which.add_argument("--model-parallel", type=int, metavar="D")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    name = "tensor_parallel" if args.tensor_parallel else "model_parallel"
    count = getattr(args, name)
    if args.child:
        return train(**{name: count})
    option = f"--{name.replace('_', '-')}"
    for given in (1, count):
        command = [sys.executable, __file__, "--child", option, str(given)]
        if args.tensor_parallel:
            ranks = [sys.executable, "-m", "collective.launch", "-np", str(count)]
            command = [*ranks, *command]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"{option} {given}: {out.stdout.splitlines()[-1]}", flush=True)
    return None


if __name__ == "__main__":
    main()
