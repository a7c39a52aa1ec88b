"""Peak memory of ``--accumulate K`` against that of one micro-batch alone.

    python benchmarks/accumulate_memory.py

ResNet-50, images of 128x128: a process that trains on micro-batches of 8 rows, and one
that trains on 64 rows as 8 micro-batches of 8. Peak resident memory of each process as
the operating system counts it; what TensorFlow takes before the model is shown too.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

MIB = 1024


def peak() -> float:
    """Peak resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


def train(rows: int, accumulate: int, size: int) -> None:
    """Trains three steps and prints the peaks before and after, MiB."""
    from backends.quiet import quiet

    with quiet():
        import backends
        from training import job
    before = peak()
    job.run(
        job.Job(
            backend="single",
            options=backends.Options(),
            model="resnet50",
            data=f"synthetic:{size}x{size}x3:10",
            global_batch_size=rows,
            accumulate=accumulate,
            steps=3,
            verbose=0,
            test=False,
        )
    )
    print(f"{before:.0f} {peak():.0f}")


def main() -> None:
    """Starts one process for each setting and prints the ratio."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--micro-batch", type=int, default=8)
    p.add_argument("--accumulate", type=int, default=8)
    p.add_argument("--size", type=int, default=128, help="height and width of images")
    p.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        return train(*args.child, args.size)
    peaks = []
    for rows, parts in (
        (args.micro_batch, 1),
        (args.micro_batch * args.accumulate, args.accumulate),
        (args.micro_batch * args.accumulate, 1),
    ):
        command = [sys.executable, __file__, "--size", str(args.size)]
        command += ["--child", str(rows), str(parts)]
        out = subprocess.run(command, capture_output=True, text=True, check=True)
        before, after = map(int, out.stdout.split()[-2:])
        peaks.append(after)
        print(
            f"batch {rows:3}, --accumulate {parts}: peak {after} MiB "
            f"(TensorFlow alone {before}), {after / peaks[0]:.2f} times the first",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
