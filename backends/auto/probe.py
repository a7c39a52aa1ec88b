"""Times a backend's all-reduce: ``python -m collective.backends.auto.probe FILE --backend NAME``.

Inside a ``tf.function``, as training calls it: float32 tensors, through the backend.
Rank 0 writes a JSON list of ``{"size": bytes, "tensors": count, "seconds": median}``.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import statistics
import sys
import time
from pathlib import Path

from collective import backends
from collective.backends.auto.measurements import Point
from collective.backends.base import Backend
from collective.backends.quiet import quiet

# Bytes and tensors of the calls that ``auto`` times: a second or two together.
CALLS = (
    *((4, 1), (1 << 16, 1), (1 << 20, 1), (1 << 24, 1)),
    *((1 << 20, 64), (1 << 24, 64), (1 << 26, 64)),
)
TOTAL_BYTES = 256 << 20  # of all calls of a size together, about
REPEATS = (5, 100)  # lowest and highest number of calls


def measure(backend: Backend, size: int, tensors: int = 1) -> Point:
    """Times all-reduces of so many bytes in so many tensors, on this rank."""
    import tensorflow as tf

    count = max(1, size // 4 // tensors)
    rows = [tf.fill([count], float(backend.rank + 1)) for _ in range(tensors)]

    def step() -> tf.Tensor:
        # A copy for each replica: a strategy does not sum a tensor that they share.
        return backend.all_reduce([tf.identity(row) for row in rows])[-1]

    # The tensors are captured, not passed: arguments take time in Python.
    @tf.function(autograph=False)
    def call() -> tf.Tensor:
        return backend.run(step, ())

    seconds = []
    for _ in range(min(max(TOTAL_BYTES // size, REPEATS[0]), REPEATS[1]) + 2):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return Point(4 * count * tensors, tensors, statistics.median(seconds[2:]))


def main(arguments: list[str]) -> int:
    """Measures, and writes on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--backend")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--sizes", help="bytes, with commas between")
    parser.add_argument("--deadline", type=float, default=600, help="in seconds")
    args = parser.parse_args(arguments)
    # The process that started this may have ended, and the backend may hang.
    faulthandler.dump_traceback_later(args.deadline, exit=True)
    with quiet():
        backend = backends.get(args.backend, backends.Options(devices=args.devices))
    calls = [(int(s), 1) for s in args.sizes.split(",")] if args.sizes else CALLS
    points = [measure(backend, *call) for call in calls]
    backend.barrier()
    if backend.rank == 0:
        args.file.write_text(json.dumps([dataclasses.asdict(p) for p in points]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
