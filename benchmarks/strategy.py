"""Compares a step of a ``strategy.run`` loop over our backends and in stock TensorFlow.

    python benchmarks/strategy.py                        # 2 ranks on this host, in turns
    python benchmarks/strategy.py --backends native tf-multiworker --ranks 2 --turns 3
    mpirun -np 2 python benchmarks/strategy.py --one native     # the command of each turn

The program is the same; only the name given to ``collective.distribute.Strategy`` differs.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time

UNITS, ROWS, STEPS, BLOCKS = 512, 32, 20, 10


def one(backend: str) -> None:
    """Run the loop as one rank; rank 0 prints milliseconds of a step, the median."""
    import keras
    import numpy as np
    import tensorflow as tf

    from collective.distribute import Strategy

    strategy = Strategy(backend)
    rank = strategy.cluster_resolver.task_id
    with strategy.scope():
        layers = [keras.layers.Dense(UNITS, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((UNITS,)), *layers])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    draw = np.random.default_rng(rank)
    x = tf.constant(draw.normal(size=(ROWS, UNITS)).astype("float32"))

    def replica(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    step = tf.function(lambda x: strategy.run(replica, args=(x,)))
    for _ in range(5):
        step(x)
    times = []
    for _ in range(BLOCKS):
        began = time.perf_counter()
        for _ in range(STEPS):
            loss = step(x)
        np.asarray(strategy.experimental_local_results(loss)[0])
        times.append((time.perf_counter() - began) / STEPS)
    if rank == 0:
        print(f"{backend}: {1e3 * statistics.median(times):.2f} ms", flush=True)


def main() -> int:
    """Start the backends in turns, and print the median of each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--one", metavar="BACKEND", help="run as a rank")
    parser.add_argument("--backends", nargs="+", default=["native", "tf-multiworker"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    if args.one:
        one(args.one)
        return 0
    found: dict[str, list[float]] = {name: [] for name in args.backends}
    for _ in range(args.turns):
        for name in args.backends:
            words = ["mpirun", "--oversubscribe", "-np", str(args.ranks)]
            words += [sys.executable, __file__, "--one", name]
            done = subprocess.run(words, capture_output=True, text=True)
            match = re.search(rf"{name}: ([\d.]+) ms", done.stdout)
            if match is None:
                print(done.stdout, done.stderr, file=sys.stderr)
                return 1
            found[name].append(float(match[1]))
    last = statistics.median(found[args.backends[-1]])
    for name, times in found.items():
        middle = statistics.median(times)
        print(f"{name:16} {middle:7.2f} ms a step, {middle / last:.2f} of the last")
    return 0


if __name__ == "__main__":
    sys.exit(main())
