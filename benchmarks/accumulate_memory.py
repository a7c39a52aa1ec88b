"""Peak memory of ``--accumulate K`` against that of one micro-batch alone.

    python benchmarks/accumulate_memory.py

ResNet-50, images of 128x128: a process that trains on micro-batches of 8 rows, and one
that trains on 64 rows as 8 micro-batches of 8. Peak resident memory of each process as
the operating system counts it; what TensorFlow takes before the model is shown too.
"""

from __future__ import annotations

import argparse

from peak import measured


def main() -> None:
    """Starts one process for each setting and prints the ratio."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--micro-batch", type=int, default=8)
    p.add_argument("--accumulate", type=int, default=8)
    p.add_argument("--size", type=int, default=128, help="height and width of images")
    args = p.parse_args()
    first = None
    for rows, parts in (
        (args.micro_batch, 1),
        (args.micro_batch * args.accumulate, args.accumulate),
        (args.micro_batch * args.accumulate, 1),
    ):
        found = measured(
            model="resnet50",
            data=f"synthetic:{args.size}x{args.size}x3:10",
            global_batch_size=rows,
            accumulate=parts,
        )
        first = first or found.after
        print(
            f"batch {rows:3}, --accumulate {parts}: peak {found.after:.0f} MiB "
            f"(TensorFlow alone {found.before:.0f}), {found.after / first:.2f} times "
            "the first",
            flush=True,
        )


if __name__ == "__main__":
    main()
