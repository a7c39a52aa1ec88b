"""All-reduce inside a ``tf.function``: the core, and Horovod beside it.

    mpirun -np 2 python benchmarks/in_function.py
    horovodrun --gloo -np 2 python benchmarks/in_function.py --bytes 4 65536 67108864

Two questions. What does a call of 4 bytes add to an empty ``tf.function``? And how long
do 160 tensors of 100 MB together take, as the gradients of a ResNet-50 would?
``collective`` is the core's op, ``drop-in`` is ``collective.tensorflow``. The
contestants take turns within one run; each time is that of the slowest rank, and the
medians of all turns are printed, with the best beside them. Sums are checked first.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from backends import horovod_installed
from backends.base import Options
from backends.devices import configure
from backends.quiet import quiet
from collective.environment import detect

TENSORS, MEGABYTES = 160, 100


def main() -> None:
    """Prints, on rank 0, a line for each contestant."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--turns", type=int, default=15)
    p.add_argument("--bytes", type=int, nargs="*", default=[4], help="of one tensor")
    args = p.parse_args()
    with quiet():
        import tensorflow as tf

        import collective

        configure(Options(), detect())
        collective.init()

        def filled(counts: list[int]) -> list:
            return [tf.fill([count], float(collective.rank() + 1)) for count in counts]

        cases = [filled([count // 4]) for count in args.bytes]
        cases.append(filled(sizes(MEGABYTES * 10**6 // 4, TENSORS)))
        summing = contestants()
    say = print if collective.rank() == 0 else lambda *_, **__: None
    say(f"{collective.size()} ranks, load {os.getloadavg()[0]:.1f}")
    for tensors in cases:
        inner = calls(sum(int(t.shape[0]) * 4 for t in tensors))
        functions = {
            name: tf.function(sums, autograph=False) for name, sums in summing.items()
        }
        total = collective.size() * (collective.size() + 1) / 2
        for name, function in functions.items():
            got = function(tensors)
            if name != "empty":
                assert all(np.all(t.numpy() == total) for t in got), name
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(args.turns):
            for name, function in functions.items():
                seconds[name].append(timed(function, tensors, inner))
        say(f"\n{what(tensors)}")
        core = float(np.median(seconds["collective"]))
        for name, times in seconds.items():
            middle = float(np.median(times))
            say(
                f"  {name:12} median {middle * 1e6:12,.1f} us   best "
                f"{min(times) * 1e6:12,.1f} us   {middle / core:6.2f} x collective"
            )


def contestants() -> dict[str, Callable]:
    """Functions from a list of tensors to the list of their sums."""
    import tensorflow as tf

    import collective.tensorflow as drop_in
    from collective import tensorflow_ops

    found: dict[str, Callable] = {
        "empty": lambda tensors: [tf.identity(t) for t in tensors],
        # Its other arguments would be looked at anew in each call of the function.
        "collective": lambda tensors: tensorflow_ops.all_reduce(tensors),
        "drop-in": through(drop_in),
    }
    if horovod_installed.misfit() is None:
        import horovod.tensorflow as hvd

        hvd.init()
        assert hvd.size() == detect().size
        found["horovod"] = through(hvd)
    return found


def through(hvd: Any) -> Callable:
    """The sum by Horovod's interface: of one tensor, or of a group."""

    def sums(tensors: list) -> list:
        if len(tensors) == 1:
            return [hvd.allreduce(tensors[0], op=hvd.Sum)]
        return hvd.grouped_allreduce(tensors, op=hvd.Sum)

    return sums


def calls(size: int) -> int:
    """How many calls make a turn: about as long whatever their bytes."""
    return max(1, min(200, 10**7 // size))


def sizes(elements: int, count: int) -> list[int]:
    """Lengths like those of a network: many small tensors, few large ones."""
    weights = np.arange(1, count + 1) ** 3.0
    return [max(1, int(n)) for n in elements * weights / weights.sum()]


def what(tensors: list) -> str:
    """How many tensors, and how many bytes they have together."""
    if len(tensors) == 1:
        return f"{int(tensors[0].shape[0]) * 4} bytes"
    megabytes = sum(int(t.shape[0]) for t in tensors) * 4 / 1e6
    return f"{len(tensors)} tensors, {megabytes:.1f} MB"


def timed(function: Callable, tensors: list, inner: int) -> float:
    """Seconds of a call on the slowest rank."""
    import collective

    collective.barrier()
    start = time.perf_counter()
    for _ in range(inner):
        function(tensors)
    mine = (time.perf_counter() - start) / inner
    return float(collective.allreduce(np.array(mine), collective.Max))


if __name__ == "__main__":
    main()
