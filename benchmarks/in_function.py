"""Compares all-reduce inside a ``tf.function`` by the core and by Horovod.

    python benchmarks/in_function.py
    python benchmarks/in_function.py --bytes 4 65536 67108864 \
        --launch "horovodrun --gloo -np 2"

It answers two questions. What does a call of 4 bytes add to an empty ``tf.function``? And how
long do 160 tensors of 100 MB together take, as the gradients of a ResNet-50 would?
``collective`` is the core's op, ``drop-in`` is ``collective.tensorflow``; these and the empty
function take turns in one job. Horovod is a job of its own, because its thread, which polls
once a millisecond, would slow the others; the jobs take turns, too. Each time is the slowest
rank's. The output has the medians and the best of all turns. Sums are checked first.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import workloads

from collective.backends import Options
from collective.backends.devices import configure
from collective.backends.horovod import installed
from collective.backends.quiet import quiet
from collective.environment import detect

TENSORS, MEGABYTES = 160, 100


def main() -> None:
    """Start the jobs and print a line for each contestant; or run a rank of one."""
    p = workloads.parser(__doc__)
    p.add_argument("--launch", default="mpirun -np 2", type=shlex.split)
    p.add_argument("--rounds", type=int, default=3, help="jobs of each kind")
    p.add_argument("--turns", type=int, default=15, help="of each contestant in a job")
    p.add_argument("--bytes", type=int, nargs="*", default=[4], help="of one tensor")
    p.add_argument("--contestants", nargs="*", help=argparse.SUPPRESS)
    p.add_argument("--record", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.contestants:
        rank(args)
        return
    jobs = [["empty", "collective", "drop-in"]]
    if installed.misfit() is None:
        jobs.append(["horovod"])
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    print(f"load {os.getloadavg()[0]:.1f}")
    for _ in range(args.rounds):
        for names in jobs:
            for case, found in job(args, names).items():
                for name, times in found.items():
                    seconds[case][name] += times
    for case, found in seconds.items():
        print(f"\n{case}")
        core = float(np.median(found["collective"]))
        for name, times in found.items():
            middle = float(np.median(times))
            print(
                f"  {name:12} median {middle * 1e6:12,.1f} us   best "
                f"{min(times) * 1e6:12,.1f} us   {middle / core:6.2f} x collective"
            )


def job(
    args: argparse.Namespace, names: list[str]
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of the calls of one job, by size and contestant."""
    with tempfile.NamedTemporaryFile() as record:
        command = [*args.launch, sys.executable, __file__, "--turns", str(args.turns)]
        command += ["--bytes", *map(str, args.bytes)]
        command += ["--contestants", *names, "--record", record.name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{', '.join(names)} failed:\n{done.stdout}{done.stderr}")
        return json.load(record)


def rank(args: argparse.Namespace) -> None:
    """Measure the contestants; rank 0 writes the record."""
    with quiet():
        import tensorflow as tf

        import collective

        configure(Options(), detect())
        collective.init()

        def filled(counts: list[int]) -> list:
            return [tf.fill([count], float(collective.rank() + 1)) for count in counts]

        cases = [filled([count // 4]) for count in args.bytes]
        cases.append(filled(sizes(MEGABYTES * 10**6 // 4, TENSORS)))
        summing = {name: contestant(name) for name in args.contestants}
    total = collective.size() * (collective.size() + 1) / 2
    found: dict[str, dict[str, list[float]]] = {}
    for tensors in cases:
        size = sum(int(t.shape[0]) * 4 for t in tensors)
        inner = max(1, min(200, 10**7 // size))  # so turns are about equally long
        functions = {}
        for name, sums in summing.items():
            functions[name] = tf.function(sums, autograph=False)
            got = functions[name](tensors)
            if name != "empty":
                assert all(np.all(t.numpy() == total) for t in got)
        case = f"{size} bytes"
        if len(tensors) > 1:
            case = f"{len(tensors)} tensors, {size / 1e6:.1f} MB"
        times = found[case] = defaultdict(list)
        for _ in range(args.turns):
            for name, function in functions.items():
                times[name].append(timed(function, tensors, inner))
    if collective.rank() == 0:
        with open(args.record, "w") as file:
            json.dump(found, file)


def contestant(name: str) -> Callable:
    """Return a function from a list of tensors to the list of their sums."""
    import tensorflow as tf

    if name == "empty":
        return lambda tensors: [tf.identity(t) for t in tensors]
    if name == "collective":
        from collective import Sum, tensorflow_ops

        # Each call of the function would inspect its other arguments.
        return lambda tensors: tensorflow_ops.all_reduce(tensors, Sum)
    package = "collective" if name == "drop-in" else "horovod"
    hvd = importlib.import_module(f"{package}.tensorflow")
    hvd.init()
    assert hvd.size() == detect().size

    def sums(tensors: list) -> list:
        if len(tensors) == 1:
            return [hvd.allreduce(tensors[0], op=hvd.Sum)]
        return hvd.grouped_allreduce(tensors, op=hvd.Sum)

    return sums


def sizes(elements: int, count: int) -> list[int]:
    """Return lengths as in a network: many small tensors, few large ones."""
    weights = np.arange(1, count + 1) ** 3.0
    return [max(1, int(n)) for n in elements * weights / weights.sum()]


def timed(function: Callable, tensors: list, inner: int) -> float:
    """Return the seconds of a call on the slowest rank."""
    import collective

    collective.barrier()
    start = time.perf_counter()
    for _ in range(inner):
        function(tensors)
    mine = (time.perf_counter() - start) / inner
    return float(collective.allreduce(np.array(mine), collective.Max))


if __name__ == "__main__":
    main()
