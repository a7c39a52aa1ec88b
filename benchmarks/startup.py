"""Measures the time from typing the command to the first step, by launcher.

    python benchmarks/startup.py --ranks 4 hello
    python benchmarks/startup.py --ranks 4 --rounds 4 --launchers collectiverun,mpirun train

``hello`` ends when the last rank runs its first line: it shows the time of the launcher
itself. ``train`` ends when the last rank has finished the first step of a small model on the
native backend. The launchers take turns, in another order each round; a warm-up round is left
out. Ranks write times of the machine's one clock (CLOCK_MONOTONIC).
"""

import time

BEGAN = time.monotonic()  # start of a rank, before anything is imported

import argparse  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

BESIDE = Path(sys.executable).parent
LAUNCHERS = {
    "collectiverun": [],
    "mpirun": ["--oversubscribe"],
    "horovodrun": [],
    "horovodrun --gloo": [],
}


def first_step() -> float:
    """Return the time at which this rank has trained one batch."""
    from collective import backends
    from collective.backends.quiet import quiet

    with quiet():
        backend = backends.get("native")
        import keras
        import workloads

        from collective import training
    shape = workloads.SHAPES["mlp"]
    model = workloads.compiled("mlp", keras.optimizers.SGD(0.1), shape)
    training.fit(model, workloads.random_rows(64, shape), backend=backend,
                 global_batch_size=64, epochs=1, verbose=0)  # fmt: skip
    return time.monotonic()


def be_a_rank(kind: str, folder: str) -> None:
    """Write a file with the time."""
    reached = first_step() if kind == "train" else BEGAN
    Path(folder, str(os.getpid())).write_text(str(reached))


def seconds(name: str, ranks: int, kind: str) -> float:
    """Return the seconds from the launcher's start until the last rank is done."""
    program, *more = name.split()
    here = str(Path(__file__).resolve())
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        subprocess.run(
            [BESIDE / program, *more, "-np", str(ranks), *LAUNCHERS[name],
             sys.executable, here, "--rank", folder, kind],
            check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
        )  # fmt: skip
        reached = [float(file.read_text()) for file in Path(folder).iterdir()]
    assert len(reached) == ranks
    return max(reached) - began


def main() -> None:
    """Run the rounds and print medians and the ratio to mpirun."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("hello", "train"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--launchers", default=",".join(LAUNCHERS), metavar="LIST")
    parser.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return be_a_rank(options.kind, options.rank)
    names = [
        name
        for name in options.launchers.split(",")
        if (BESIDE / name.split()[0]).exists()
    ]
    took: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(options.rounds + 1):
        for i in range(len(names)):
            name = names[(i + round_) % len(names)]
            time_taken = seconds(name, options.ranks, options.kind)
            if round_:
                took[name].append(time_taken)
    print(f"{options.kind}, {options.ranks} ranks, {options.rounds} rounds; seconds")
    print(f"{'':>18} {'median':>7} {'least':>7} {'most':>7} {'/ mpirun':>9}")
    for name, times in took.items():
        pairs = zip(times, took["mpirun"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        middle = statistics.median(times)
        print(
            f"{name:>18} {middle:7.2f} {min(times):7.2f} {max(times):7.2f} {ratio:9.2f}"
        )


if __name__ == "__main__":
    main()
