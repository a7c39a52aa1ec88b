"""An all-reduce as a NumPy user calls it, beside mpi4py's, on the same arrays.

mpirun -np 2 --bind-to core python benchmarks/numpy_calls.py

Arrays are those of ``np.empty``. Blocks of calls take turns; a time is the median over the
blocks of the slowest rank's mean.
"""

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import collective

SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20)
BLOCKS, SECONDS = 15, 0.05


def seconds(call: Callable[[], object], calls: int) -> float:
    """The mean time of a call on the slowest rank."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    mean = (time.perf_counter() - start) / calls
    return MPI.COMM_WORLD.allreduce(mean, MPI.MAX)


def main() -> None:
    """Prints a line for each size."""
    collective.init()
    if collective.rank() == 0:
        print(f"{'bytes':>10} {'collective us':>14} {'mpi4py us':>10} {'ratio':>6}")
    for size in SIZES:
        source, target = np.empty(size // 4, "f4"), np.empty(size // 4, "f4")
        source[:] = collective.rank()
        calls = [
            lambda: collective.allreduce(source, op=collective.Sum, out=target),  # noqa: B023
            lambda: MPI.COMM_WORLD.Allreduce(source, target),  # noqa: B023
        ]
        counts = [max(2, int(SECONDS / seconds(call, 5))) for call in calls]
        times = np.median(
            [
                [seconds(call, n) for call, n in zip(calls, counts, strict=True)]
                for _ in range(BLOCKS)
            ],
            axis=0,
        )
        if collective.rank() == 0:
            ours, theirs = 1e6 * times
            print(f"{size:>10} {ours:>14.1f} {theirs:>10.1f} {theirs / ours:>6.2f}")


if __name__ == "__main__":
    main()
