"""What watching a training costs: the desync alarm every 100 steps, the timeline.

    python -m collective.launch -np 2 python benchmarks/watching.py mlp
    mpirun -np 2 python benchmarks/watching.py cnn --backend mpi

In one job, a block of 100 steps plain, one with the alarm, one with the timeline, and
so on; the ratios are taken round by round. The first round is left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np

import backends
from backends.quiet import quiet

STEPS = 100


def main() -> None:
    """Runs the rounds; rank 0 prints medians and ratios."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", nargs="?", default="cnn")
    p.add_argument("--backend", default="auto")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--timeline", default=f"{tempfile.gettempdir()}/watching.json")
    args = p.parse_args()
    with quiet():
        backend = backends.get(args.backend)
        import keras

        from training import datasets, keras_compat, models
        from training.inputs import Input
        from training.step import Step
        from training.timeline import Timeline

    plan = Input(datasets.load("digits").train, args.batch)
    batches = plan.dataset(0, 22, backend.local_replicas, backend.replicas)
    held = [batch for batch in batches if int(batch.global_rows) == args.batch]

    def step(every: int) -> Step:
        keras.utils.set_random_seed(0)
        with backend.scope():
            model = models.build(args.model, input_shape=(8, 8, 1), classes=10)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
            keras_compat.build(model, plan.spec[:3])
        return Step(model, backend, plan.spec, check_every=every)

    steps = {"plain": step(0), "alarm": step(STEPS), "timeline": step(0)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    backend.barrier()
    with Timeline(args.timeline, backend) as timeline:
        for _ in range(args.rounds + 1):
            for name, run in steps.items():
                began = time.perf_counter()
                for number in range(STEPS):
                    begin = time.perf_counter()
                    batch = held[number % len(held)]
                    ready = time.perf_counter()
                    report = run(batch, number)
                    done = time.perf_counter()
                    if name == "timeline":
                        timeline.step(number, begin, ready, done, report)
                seconds[name].append(time.perf_counter() - began)
    if backend.rank == 0:
        print(f"{args.model}, {backend.name}, {backend.replicas} replicas, "
              f"{args.rounds} rounds of {STEPS} steps")  # fmt: skip
        plain = np.array(seconds["plain"][1:])
        for name, all_of in seconds.items():
            some = np.array(all_of[1:])
            low, middle, high = np.percentile(some / plain, [25, 50, 75])
            print(f"  {name:9} {1e3 * np.median(some) / STEPS:7.3f} ms a step, "
                  f"{middle:.3f} of plain (quartiles {low:.3f} to {high:.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
