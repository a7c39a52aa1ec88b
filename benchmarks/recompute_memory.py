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

import keras
from peak import measured

DATA = {"resnet50": "synthetic:128x128x3:10", "transformer": "synthetic:256x64x1:10"}


def transformer(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """One of 8 blocks, of width 256."""
    from collective.training.models import transformer

    return transformer(input_shape, classes, blocks=8, width=256, heads=8)


def main() -> None:
    """Starts one process for each setting."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", choices=DATA)
    p.add_argument("--rows", type=int, default=32, help="of the batch")
    p.add_argument("--accumulate", type=int, default=4)
    args = p.parse_args()
    mine = args.model == "transformer"
    first = None
    for accumulate, recompute in itertools.product((1, args.accumulate), (False, True)):
        before, after, seconds = measured(
            model="recompute_memory:transformer" if mine else args.model,
            data=DATA[args.model],
            global_batch_size=args.rows,
            accumulate=accumulate,
            recompute=recompute,
        )
        first = first or after
        print(
            f"--accumulate {accumulate}{' --recompute' if recompute else '':12}: peak "
            f"{after:.0f} MiB ({after / first:.2f} of the first; TensorFlow alone "
            f"{before:.0f}), {seconds:.1f} s a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
