"""Measures the cost of watching a training: the desync alarm every 100 steps, the timeline.

    collectiverun -np 2 python benchmarks/watching.py mlp
    mpirun -np 2 python benchmarks/watching.py cnn --backend mpi

In one job, a step without the alarm and one with it take turns; every hundredth of the latter
compares. The output has their medians, and the mean time that the timeline takes after each
step. The first round is left out.
"""

from __future__ import annotations

import tempfile
import time

import numpy as np
import workloads

from collective import backends
from collective.backends.quiet import quiet

STEPS = 100


def main() -> None:
    """Run the rounds; rank 0 prints medians and ratios."""
    p = workloads.parser(__doc__)
    p.add_argument("model", nargs="?", default="cnn")
    p.add_argument("--backend", default="auto")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--timeline", default=f"{tempfile.gettempdir()}/watching.json")
    args = p.parse_args()
    with quiet():
        backend = backends.get(args.backend)
        from collective.training.input import datasets
        from collective.training.input.pipeline import Input
        from collective.training.observers.desync import DesyncAlarm
        from collective.training.observers.timeline import begin as begin_timeline

    plan = Input(datasets.load("digits").train, args.batch)
    batches = plan.dataset(0, 22, backend.local_replicas, backend.replicas)
    held = [batch for batch in batches if int(batch.global_rows) == args.batch]
    plain = workloads.training_step(args.model, backend, plan)
    alarm = workloads.training_step(
        args.model, backend, plan, lambda model: [DesyncAlarm(model, backend, STEPS)]
    )
    seconds: dict[str, list[float]] = {"plain": [], "alarm": [], "check": []}
    recording: list[float] = []
    backend.barrier()
    with begin_timeline(args.timeline, backend) as timeline:
        for turn in range(args.rounds * STEPS):
            number, batch = turn % STEPS, held[turn % len(held)]
            for name, run in (("plain", plain), ("alarm", alarm)):
                begin = time.perf_counter()
                report = run(batch, number)
                done = time.perf_counter()
                checks = name == "alarm" and number == 0
                seconds["check" if checks else name].append(done - begin)
            timeline.step(number, begin, begin, done, report)
            recording.append(time.perf_counter() - done)
    if backend.rank == 0:
        without, ordinary, check = (
            1e3 * np.median(seconds[name][len(seconds[name]) // args.rounds :])
            for name in ("plain", "alarm", "check")
        )
        more = ordinary - without + (check - ordinary) / STEPS
        recorded = 1e3 * np.mean(recording[STEPS:])
        print(f"{args.model}, {backend.name}, {backend.replicas} replicas, "
              f"{args.rounds} rounds of {STEPS} steps; ms on rank 0")  # fmt: skip
        print(f"  a step {without:.3f}, with the alarm on {ordinary:.3f}, one that "
              f"compares {check:.3f}")  # fmt: skip
        print(f"  the alarm, at one in {STEPS}: {more:+.4f} a step, "
              f"{100 * more / without:+.2f} %")  # fmt: skip
        print(f"  the timeline: {recorded:.4f} a step, "
              f"{100 * recorded / without:.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
