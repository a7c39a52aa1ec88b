"""What the flight recorder costs: whole steps of two jobs, one of them without it.

    python benchmarks/recording.py cnn
    python benchmarks/recording.py tiny

Both jobs are there all the time and take turns, in an order that changes: while one
makes its steps, the other sleeps. ``cnn`` and ``mlp`` are trained by ``training.fit``
on ``native``; a step of ``tiny`` is nothing but 100 all-reduces of 1 KB from NumPy. The
medians are over the turns, and the ratio is taken turn by turn. The first is left out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SIZES = {"cnn": 50, "mlp": 200, "tiny": 50}  # steps of a turn
ROOT = Path(__file__).parents[1]


def main() -> None:
    """Starts both jobs, gives them their turns, and prints medians and the ratio."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=SIZES, nargs="?", default="cnn")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--turns", type=int, default=40)
    p.add_argument("--rank-of-a-job", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.rank_of_a_job:
        rank(args.what, args.turns)
        return
    with tempfile.TemporaryDirectory() as folder:
        jobs = [start(args, recorder) for recorder in ("off", folder)]
        for job in jobs:
            job.stdout.readline()  # it is ready
        seconds: list[list[float]] = [[], []]
        for turn in range(args.turns):
            for which in (0, 1) if turn % 2 else (1, 0):
                seconds[which].append(float(ask(jobs[which])))
        for job in jobs:
            job.wait()
    off, on = (1e3 * np.array(each[1:]) / SIZES[args.what] for each in seconds)
    low, middle, high = np.percentile(on / off, [25, 50, 75])
    load = os.getloadavg()[0]
    print(f"{args.what}, {args.ranks} ranks, {args.turns - 1} turns of "
          f"{SIZES[args.what]} steps; load {load:.1f}")  # fmt: skip
    print(f"  off {np.median(off):8.4f} ms a step (median)")
    print(f"  on  {np.median(on):8.4f} ms a step (median)")
    print(f"  ratio {middle:.4f} (quartiles {low:.4f} to {high:.4f})")


def start(args: argparse.Namespace, recorder: str) -> subprocess.Popen:
    """A job, with the recorder as ``COLLECTIVE_RECORDER`` says."""
    command = [sys.executable, "-m", "collective.launch", "-np", str(args.ranks)]
    command += ["--no-prefix", sys.executable, __file__, args.what]
    command += ["--turns", str(args.turns), "--rank-of-a-job"]
    env = {**os.environ, "COLLECTIVE_RECORDER": recorder, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)


def ask(job: subprocess.Popen) -> str:
    """Gives a job its turn; what rank 0 prints at its end."""
    job.stdin.write("go\n")
    job.stdin.flush()
    return job.stdout.readline()


def rank(what: str, turns: int) -> None:
    """A rank of one of the jobs."""
    if what == "tiny":
        reduce_only(turns)
    else:
        train(what, turns)


def wait() -> None:
    """Until it is this job's turn. Where nobody gives it one any more, ends the job."""
    if not sys.stdin.readline():
        os._exit(1)


def reduce_only(turns: int) -> None:
    """Takes part in small all-reduces."""
    import collective

    collective.init()
    array = np.ones(256, np.float32)
    names = [f"gradient {number}" for number in range(100)]
    leads = collective.rank() == 0
    if leads:
        print("ready", flush=True)
    for _ in range(turns):
        if leads:
            wait()
        collective.barrier()
        begin = time.perf_counter()
        for _ in range(SIZES["tiny"]):
            for name in names:
                collective.allreduce(array, name=name)
        if leads:
            print(time.perf_counter() - begin, flush=True)


def train(what: str, turns: int) -> None:
    """Takes part in a training of which each epoch is a turn."""
    import backends
    from backends.quiet import quiet

    with quiet():
        backend = backends.get("native")
        import keras

        import training
        from training import models

    class Turn(keras.callbacks.Callback):
        """On rank 0, on which the others wait."""

        def on_train_begin(self, logs: dict | None = None) -> None:
            print("ready", flush=True)

        def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
            wait()
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            print(time.perf_counter() - self.began, flush=True)

    batch, rows = 64, 64 * SIZES[what]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 8, 8, 1)).astype(np.float32)
    y = rng.integers(0, 10, rows).astype(np.int32)
    keras.utils.set_random_seed(0)
    with backend.scope():
        model = models.build(what, input_shape=(8, 8, 1), classes=10)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    training.fit(
        model, (x, y), backend=backend, global_batch_size=batch, epochs=turns,
        callbacks=[Turn()], verbose=0,
    )  # fmt: skip


if __name__ == "__main__":
    main()
