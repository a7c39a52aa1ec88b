"""What ``collective.training.fit`` costs over plain ``keras.Model.fit``, at one process.

    python benchmarks/fit_overhead.py cnn
    python benchmarks/fit_overhead.py resnet50

Two models of the same kind train on the same arrays, an epoch of one, an epoch of the
other, in one process; the ratio is taken pair by pair. The first pair is left out.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from collective import backends
from collective.backends.quiet import quiet

# Shape of a row, classes, rows of an epoch, batch size.
SIZES = {
    "mlp": ((28, 28, 1), 10, 6400, 64),
    "cnn": ((28, 28, 1), 10, 3200, 64),
    "resnet50": ((64, 64, 3), 10, 384, 16),
}


def main() -> None:
    """Runs the pairs and prints medians and their ratio."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", choices=SIZES, nargs="?", default="cnn")
    p.add_argument("--pairs", type=int, default=15)
    args = p.parse_args()
    with quiet():
        backend = backends.get("single")
        import keras

        from collective import training
        from collective.training import models

    shape, classes, rows, batch = SIZES[args.model]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, *shape)).astype(np.float32)
    y = rng.integers(0, classes, rows).astype(np.int32)

    def make() -> keras.Model:
        model = models.build(args.model, input_shape=shape, classes=classes)
        model.compile(
            keras.optimizers.SGD(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
        )
        return model

    plain, ours, theirs = make(), [], []

    class Pair(keras.callbacks.Callback):
        """After each epoch of ours, one of plain Keras."""

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
    a, b = np.array(ours[1:]), np.array(theirs[1:])
    steps = -(-rows // batch)
    low, middle, high = np.percentile(a / b, [25, 50, 75])
    print(f"{args.model}, batch {batch}, {len(a)} pairs of epochs of {steps} steps")
    print(
        f"  collective.training.fit    {1e3 * np.median(a) / steps:8.2f} ms a step (median)"
    )
    print(f"  keras.Model.fit {1e3 * np.median(b) / steps:8.2f} ms a step (median)")
    print(f"  ratio           {middle:8.3f} (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
