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

    kind = {"images": images, "wide": wide}[sys.argv[1]]
    before = resident()
    # What the first one leaves behind counts for the second, too.
    turns = (4, 1) if kind is images else (1, 4)
    peaks = {n: (highest(lambda n=n: kind(n)) - before) / MIB for n in turns}
    print(peaks[4], peaks[1])


@pytest.mark.launches
# The second: gradients of one piece beside their sum so far, and not those of all pieces.
@pytest.mark.parametrize(("kind", "at_most"), [("images", 0.5), ("wide", 2.0)])
def test_four_micro_batches_take_less_memory(kind, at_most, tmp_path):
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of a process cannot be set back here")
    # What is freed goes back to the operating system at once.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, kind]
    out = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert not out.returncode, out.stderr
    four, one = map(float, out.stdout.split()[-2:])
    assert four < at_most * one, (four, one)


if __name__ == "__main__":
    main()
