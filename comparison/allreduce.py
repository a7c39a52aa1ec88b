"""All-reduce time over message size: ``python -m comparison.allreduce FILE ...``.

Inside a ``tf.function``, as training calls it: one float32 tensor, through the
backend. Rank 0 writes a JSON object: bytes to seconds (medians).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import tensorflow as tf

import backends
from backends.base import Backend
from comparison.speed import MESSAGE_SIZES

MOVED = 256 << 20  # bytes, of all calls of a size together, about
CALLS = (8, 100)


def measure(backend: Backend, size: int) -> float:
    """Median seconds of an all-reduce of so many bytes, on this rank."""

    @tf.function(autograph=False)
    def call(rows: tf.Tensor) -> tf.Tensor:
        return backend.run(lambda r: backend.all_reduce([r])[0], (rows,))

    rows = tf.fill([size // 4], float(backend.rank + 1))
    seconds = []
    for _ in range(min(max(MOVED // size, CALLS[0]), CALLS[1]) + 2):
        begin = time.perf_counter()
        call(rows)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def main(arguments: list[str]) -> int:
    """Measures, and writes on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--backend")
    parser.add_argument("--devices", type=int)
    args = parser.parse_args(arguments)
    backend = backends.get(args.backend, backends.Options(devices=args.devices))
    times = {size: measure(backend, size) for size in MESSAGE_SIZES}
    if backend.rank == 0:
        args.file.write_text(json.dumps(times))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
