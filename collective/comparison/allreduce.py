"""Times a backend's all-reduce: ``python -m collective.comparison.allreduce FILE --backend NAME``.

Inside a ``tf.function``, as training calls it: one float32 tensor, through the backend.
Rank 0 writes a JSON object of seconds by bytes: medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from collective import backends
from collective.backends.base import Backend
from collective.backends.quiet import quiet
from collective.comparison.speed import MESSAGE_SIZES

TOTAL_BYTES = 256 << 20  # of all calls of a size together, about
REPEATS = (5, 100)  # lowest and highest number of calls


def measure(backend: Backend, size: int) -> float:
    """The median of seconds that an all-reduce of so many bytes takes on this rank."""
    import tensorflow as tf

    row = tf.fill([size // 4], float(backend.rank + 1))

    def step() -> tf.Tensor:
        # A copy for each replica: a strategy does not sum a tensor that they share.
        return backend.all_reduce([tf.identity(row)])[0]

    # The tensor is captured, not passed: arguments take time in Python.
    @tf.function(autograph=False)
    def call() -> tf.Tensor:
        return backend.run(step, ())

    seconds = []
    for _ in range(min(max(TOTAL_BYTES // size, REPEATS[0]), REPEATS[1]) + 2):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def main(arguments: list[str]) -> int:
    """Measures, and writes on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--backend")
    parser.add_argument("--devices", type=int)
    args = parser.parse_args(arguments)
    with quiet():
        backend = backends.get(args.backend, backends.Options(devices=args.devices))
    seconds = {str(size): measure(backend, size) for size in MESSAGE_SIZES}
    backend.barrier()
    if backend.rank == 0:
        args.file.write_text(json.dumps(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
