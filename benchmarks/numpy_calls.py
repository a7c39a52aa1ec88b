"""An all-reduce as a NumPy user calls it, beside mpi4py's, on the same arrays.

mpirun -np 2 python benchmarks/numpy_calls.py

As ``python -m collective.bench``, which times calls from C: blocks of the two take turns,
results are checked, and a time is the median of the slowest rank's. Arrays lie 16 bytes
after a page, as ``np.empty`` has them.
"""

import numpy as np
from mpi4py import MPI

import collective
from collective.bench.measure import Bench, Subject, measure
from collective.bench.peers import loop

SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20)
SECONDS = 0.4


class FromPython(Bench):
    """The all-reduce through the public function."""

    def time(
        self, source: np.ndarray, target: np.ndarray, repetitions: int, inner: int
    ) -> np.ndarray:
        """As ``Bench.time``."""
        return loop(
            lambda: collective.allreduce(source, op=collective.Sum, out=target),
            repetitions,
            inner,
        )


def by_mpi4py(
    source: np.ndarray, target: np.ndarray, repetitions: int, inner: int
) -> np.ndarray:
    """The same by mpi4py."""
    return loop(lambda: MPI.COMM_WORLD.Allreduce(source, target), repetitions, inner)


def main() -> None:
    """Prints a line for each size, and for each state of the cores that was met."""
    collective.init()
    speaks = collective.rank() == 0
    if speaks:
        print(
            f"{'bytes':>10} {'cores':>6} {'collective us':>14} {'mpi4py us':>10} ratio"
        )
    for size in SIZES:
        subject = Subject("allreduce", "auto", None, size, in_place=False, offset=16)
        wrong, samples = measure(FromPython(subject), {"mpi4py": by_mpi4py}, SECONDS)
        assert not wrong
        for state, found in samples.items():
            if speaks and found.native and found.peers["mpi4py"]:
                ours = 1e6 * np.median(found.native)
                theirs = 1e6 * np.median(found.peers["mpi4py"])
                print(
                    f"{size:>10} {state:>6} {ours:>14.1f} {theirs:>10.1f} "
                    f"{theirs / ours:.2f}"
                )


if __name__ == "__main__":
    main()
