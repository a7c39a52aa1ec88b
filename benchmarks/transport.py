"""How much faster is an all-reduce whose elements travel as 16 bits?

collectiverun -np 2 python benchmarks/transport.py --sizes 1,4,16,64

float32 and bfloat16 take turns in one run, block by block. Microseconds of the slowest
rank: the median, and the tenth percentile, which other programs on the machine disturb
less.
"""

from __future__ import annotations

import os

import common
import numpy as np

import collective
from collective.bench.limits import probe
from collective.bench.measure import Bench, Subject, slowest

BLOCKS = 6


def main() -> None:
    """Prints a line for each size and place."""
    parser = common.parser(__doc__)
    parser.add_argument("--sizes", default="1,4,16,64,256", help="MiB")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    options = parser.parse_args()
    collective.init()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[collective.local_rank() % len(cores)]})
    latency = probe() * 1e9
    if collective.rank() == 0:
        print(f"# a cache line from core to core: {latency:.0f} ns")
    for mebibytes in options.sizes.split(","):
        for in_place in (False, True):
            figures = compare(int(mebibytes) << 20, in_place, options.seconds)
            if collective.rank() == 0:
                (half, low), (full, best) = figures["bfloat16"], figures[None]
                print(
                    f"{mebibytes:>4} MiB {'in' if in_place else 'out':3}"
                    f"  float32 {full:7.0f} ({best:7.0f})"
                    f"  bfloat16 {half:7.0f} ({low:7.0f})"
                    f"  times as fast {full / half:.2f} ({best / low:.2f})",
                    flush=True,
                )
    collective.shutdown()


def compare(size: int, in_place: bool, seconds: float) -> dict:
    """By transport: the median and the tenth percentile, in microseconds."""
    benches = {
        transport: Bench(Subject("allreduce", "auto", transport, size, in_place))
        for transport in (None, "bfloat16")
    }
    repetitions = {}
    times: dict = {transport: [] for transport in benches}
    for transport, bench in benches.items():
        assert bench.check() == 0, "wrong sum"
        once = slowest(bench.time(bench.source, bench.target, 3, 1)).min()
        repetitions[transport] = int(np.clip(seconds / BLOCKS / once, 2, 300))
    for _ in range(BLOCKS):
        for transport, bench in benches.items():
            block = bench.time(bench.source, bench.target, repetitions[transport], 1)
            times[transport].extend(slowest(block) * 1e6)
    return {
        transport: (np.median(taken), np.percentile(taken, 10))
        for transport, taken in times.items()
    }


if __name__ == "__main__":
    main()
