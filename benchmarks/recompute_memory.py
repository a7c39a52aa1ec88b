"""Peak memory and time of a step with ``--recompute`` and without, and ``--accumulate``.

    python benchmarks/recompute_memory.py resnet50
    python benchmarks/recompute_memory.py transformer

ResNet-50 on images of 128x128, or a transformer of 8 blocks on sequences of 256 vectors:
a process for each setting, which makes three steps. Peak resident memory of the process
as the operating system counts it, and what TensorFlow takes before the model.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import subprocess
import sys

import keras

DATA = {"resnet50": "synthetic:128x128x3:10", "transformer": "synthetic:256x64x1:10"}


def transformer(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """One of 8 blocks, of width 256."""
    from training.models import transformer

    return transformer(input_shape, classes, blocks=8, width=256, heads=8)


def peak() -> float:
    """Peak resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(name: str, rows: int, accumulate: int, recompute: bool) -> None:
    """Trains three steps; prints the peaks before and after, and a step's time."""
    from backends.quiet import quiet

    with quiet():
        from training import job
    before = peak()
    summary = job.run(
        job.Job(
            backend="single",
            model=name if name == "resnet50" else "__main__:transformer",
            data=DATA[name],
            global_batch_size=rows,
            accumulate=accumulate,
            recompute=recompute,
            steps=3,
            verbose=0,
            test=False,
        )
    )
    print(f"{before:.0f} {peak():.0f} {min(summary.step_seconds[1:]):.2f}")


def main() -> None:
    """Starts one process for each setting."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", choices=DATA)
    p.add_argument("--rows", type=int, default=32, help="of the batch")
    p.add_argument("--accumulate", type=int, default=4)
    p.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return train(args.model, args.rows, args.child[0], bool(args.child[1]))
    first = None
    for accumulate, recompute in itertools.product((1, args.accumulate), (0, 1)):
        command = [sys.executable, __file__, args.model, "--rows", str(args.rows)]
        command += ["--child", str(accumulate), str(recompute)]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        before, after, seconds = map(float, out.stdout.split()[-3:])
        first = first or after
        print(
            f"--accumulate {accumulate}{' --recompute' if recompute else '':12}: peak "
            f"{after:.0f} MiB ({after / first:.2f} of the first; TensorFlow alone "
            f"{before:.0f}), {seconds:.1f} s a step",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
