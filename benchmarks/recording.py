"""Measures the cost of the flight recorder in a training step.

    collectiverun -np 2 python benchmarks/recording.py cnn
    collectiverun -np 2 python benchmarks/recording.py tiny

A block of steps with it and a block without it take turns, in a changing order, in the same
processes, so that other work of the machine affects both alike. The ratio is taken block by
block; a bootstrap gives the interval of its median. ``cnn`` and ``mlp`` are steps of
``training`` on ``native``, with the spans that ``collective.training.fit`` records; a step of
``tiny`` consists of 100 all-reduces of 1 KB from NumPy.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import numpy as np
import workloads

import collective
from collective import recorder, session

SIZES = {"cnn": 20, "mlp": 50, "tiny": 20}  # steps of a block
WARM = 4  # blocks that do not count
SETTLE = 3  # steps at the beginning of a block that are not timed


def main() -> None:
    """Take part in all blocks; rank 0 prints medians and the ratio."""
    p = workloads.parser(__doc__)
    p.add_argument("what", choices=SIZES, nargs="?", default="cnn")
    p.add_argument("--blocks", type=int, default=600, help="pairs of them")
    args = p.parse_args()
    step = reduce_only() if args.what == "tiny" else training_step(args.what)
    seconds: list[list[float]] = [[], []]
    for block in range(args.blocks):
        for on in (0, 1) if block % 2 else (1, 0):
            switch(bool(on), f"{block}")
            for _ in range(SETTLE):
                step()
            collective.barrier()
            begin = time.perf_counter()
            for _ in range(SIZES[args.what]):
                step()
            collective.barrier()
            seconds[on].append(time.perf_counter() - begin)
    if collective.rank():
        return
    off, on = (1e3 * np.array(each[WARM:]) / SIZES[args.what] for each in seconds)
    low, high = interval(on / off)
    print(f"{args.what}, {collective.size()} ranks, {len(on)} pairs of "
          f"{SIZES[args.what]} steps; load {os.getloadavg()[0]:.1f}")  # fmt: skip
    print(f"  off {np.median(off):8.4f} ms a step (median)")
    print(f"  on  {np.median(on):8.4f} ms a step (median)")
    print(f"  ratio {np.median(on / off):.4f} (95 % of {low:.4f} to {high:.4f})")


def switch(on: bool, name: str) -> None:
    """Open the recorder, or close it; every rank calls this."""
    recorder.close()
    if on:
        place = session.place()
        recorder.start(place, f"{session.job_name(place)} {name}")


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """Return the interval in which the median lies, with 95 %."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(ratios, (2000, ratios.size))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return low, high


def reduce_only() -> Callable[[], None]:
    """Return a step of small all-reduces."""
    collective.init()
    array = np.ones(256, np.float32)
    names = [f"gradient {number}" for number in range(100)]

    def step() -> None:
        for name in names:
            collective.allreduce(array, name=name)

    return step


def training_step(what: str) -> Callable[[], None]:
    """Return a step of a training that does not end."""
    from collective.backends.quiet import quiet

    with quiet():
        backend = collective.backends.get("native")
        from collective.training.input.pipeline import Input

    plan = Input(workloads.random_rows(4096, (8, 8, 1)), 64)
    make = workloads.training_step(what, backend, plan)
    ahead = iter(plan.dataset(0, 10**6, backend.local_replicas, backend.replicas))
    numbers = itertools.count()

    def step() -> None:
        number = next(numbers)
        recorder.waits_for_input(number, time.perf_counter())
        batch = next(ahead)
        recorder.in_step(number, time.perf_counter())
        make(batch)
        recorder.in_no_step()

    return step


if __name__ == "__main__":
    main()
