"""Measures the cost of ``collective.training.fit`` over ``keras.Model.fit``, in one process.

    python benchmarks/fit_overhead.py cnn
    python benchmarks/fit_overhead.py resnet50
    python benchmarks/fit_overhead.py resnet50 --jit-compile    # as Keras does on GPUs

Two models of the same kind train on the same arrays in one process, and take turns after each
epoch. The ratio is taken pair by pair, without the first pair.
"""

from __future__ import annotations

import time

import workloads

from collective import backends
from collective.backends.quiet import quiet

# Rows of an epoch, and the batch size.
SIZES = {"mlp": (6400, 64), "cnn": (3200, 64), "resnet50": (384, 16)}


def main() -> None:
    """Run the pairs and print medians and their ratio."""
    p = workloads.parser(__doc__)
    p.add_argument("model", choices=SIZES, nargs="?", default="cnn")
    p.add_argument("--pairs", type=int, default=15)
    p.add_argument("--jit-compile", action="store_true", help="both by XLA")
    args = p.parse_args()
    with quiet():
        backend = backends.get("single")
        import keras

        from collective import training

    rows, batch = SIZES[args.model]
    shape = workloads.SHAPES[args.model]
    x, y = workloads.random_rows(rows, shape)

    def make() -> keras.Model:
        options = {"metrics": ["accuracy"], "jit_compile": args.jit_compile}
        return workloads.compiled(
            args.model, keras.optimizers.SGD(1e-3), shape, **options
        )

    plain, ours, theirs = make(), [], []

    class Pair(keras.callbacks.Callback):
        """Runs one epoch of plain Keras after each epoch of ours."""

        def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            ours.append(time.perf_counter() - self.began)
            began = time.perf_counter()
            plain.fit(x, y, batch_size=batch, verbose=0)
            theirs.append(time.perf_counter() - began)

    training.fit(
        make(), (x, y), backend=backend, global_batch_size=batch,
        epochs=args.pairs + 1, callbacks=[Pair()], verbose=0,
    )  # fmt: skip
    steps = -(-rows // batch)
    print(f"{args.model}, batch {batch}, {args.pairs} pairs of epochs of {steps} steps")
    workloads.print_pairs(
        ("collective.fit", "keras.Model.fit"), (ours[1:], theirs[1:]), steps
    )


if __name__ == "__main__":
    main()
