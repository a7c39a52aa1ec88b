"""Micro-batches save memory: the peak of a process that trains with and without them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20


def resident() -> int:
    """Return the bytes that this process holds now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def highest(call: Callable[[], None]) -> int:
    """Return how many bytes this process holds at most, during a call."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    call()
    status = Path("/proc/self/status").read_text()
    line = next(s for s in status.splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print how many MiB two models take with four micro-batches, and without."""
    import keras
    import numpy as np

    import collective

    layers = keras.layers
    rng = np.random.default_rng(0)

    def train(model: keras.Model, rows: int, shape: tuple[int, ...], pieces: int):
        x = rng.normal(size=(2 * rows, *shape)).astype("float32")
        y = rng.integers(0, 10, 2 * rows)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
        collective.fit(
            model, x, y, backend="single", batch_size=rows, accumulate=pieces, verbose=0
        )

    def images(pieces: int) -> None:
        convolutions = [layers.Conv2D(32, 3, activation="relu") for _ in range(4)]
        head = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
        shape = (96, 96, 3)
        model = keras.Sequential([keras.Input(shape), *convolutions, *head])
        train(model, 64, shape, pieces)

    def wide(pieces: int) -> None:
        hidden = [layers.Dense(2048, "relu") for _ in range(5)]
        model = keras.Sequential([keras.Input((2048,)), *hidden, layers.Dense(10)])
        train(model, 16, (2048,), pieces)

    # What the first one leaves behind counts for the second, too.
    for kind, turns in ((images, (4, 1)), (wide, (1, 4))):
        before = resident()
        peaks = {n: highest(lambda n=n, kind=kind: kind(n)) - before for n in turns}
        print(kind.__name__, peaks[4] / MIB, peaks[1] / MIB, flush=True)


@pytest.mark.launches
def test_four_micro_batches_take_less_memory_than_one(tmp_path):
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of a process cannot be set back here")
    # What is freed goes back to the operating system at once.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB), "PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [sys.executable, __file__],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert not out.returncode, out.stderr
    lines = [line.split() for line in out.stdout.splitlines() if line]
    found = {name: (float(four), float(one)) for name, four, one in lines}
    four, one = found["images"]
    assert four < 0.5 * one, found
    # The gradients of one piece beside their sum so far, and not those of all pieces.
    four, one = found["wide"]
    assert four < 1.8 * one, found


if __name__ == "__main__":
    main()
