"""CPU time of short calls: Keras alone, and a rank of a job, in turns.

    python benchmarks/short_calls.py -np 2

A script that calls ``predict`` for each row, or ``fit`` for each batch, spends its time
around the step. Each line is milliseconds of CPU of a call, of the whole process: the least
of several turns, for a process that shares its cores is only ever slower.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CALLS = {"fit": 20, "evaluate": 20, "predict": 20, "train_on_batch": 200}


def measure() -> None:
    """Print the CPU seconds of each call as JSON; runs as an ordinary script."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    y = x[:, :1]
    calls: dict[str, Callable[[], object]] = {
        "fit": lambda: model.fit(x, y, batch_size=32, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x[:1], verbose=0),
        "train_on_batch": lambda: model.train_on_batch(x, y),
    }
    print(
        "FOUND", json.dumps({name: cost(calls[name], n) for name, n in CALLS.items()})
    )


def cost(call: Callable[[], object], times: int) -> float:
    """Return the CPU seconds of a call, the mean of several after three."""
    for _ in range(3):
        call()
    begin = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - begin) / times


def run(command: list[str]) -> dict[str, float]:
    """Run this file as a script; return what rank 0 has measured."""
    ended = subprocess.run([*command, __file__, "--measure"], capture_output=True)
    lines = ended.stdout.decode().splitlines()
    found = [line for line in lines if line.startswith("FOUND ")]
    if not found:
        sys.exit(ended.stderr.decode())
    return json.loads(found[0].removeprefix("FOUND "))


def main() -> None:
    """Measure in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-np", type=int, default=2, help="ranks of the job")
    parser.add_argument("--turns", type=int, default=3, help="runs of each")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure()
        return
    launcher = str(Path(sys.executable).with_name("collectiverun"))
    kinds = {
        "Keras": [sys.executable],
        "1 rank": [launcher, "-np", "1", "--keras"],
        f"of {options.np} ranks": [launcher, "-np", str(options.np), "--keras"],
    }
    best: dict[str, dict[str, float]] = {}
    for _ in range(options.turns):
        for kind, command in kinds.items():
            for name, seconds in run(command).items():
                found = best.setdefault(name, {})
                found[kind] = min(found.get(kind, seconds), seconds)
    print("ms of CPU a call".ljust(18), *(kind.rjust(12) for kind in kinds))
    for name, row in best.items():
        cells = [f"{1e3 * row[kind]:.2f}".rjust(12) for kind in kinds]
        print(name.ljust(18), *cells)


if __name__ == "__main__":
    main()
