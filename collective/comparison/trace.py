"""Records a training for the equality test; trains once more to be timed.

``python -m collective.comparison.trace FILE [--summary FILE] [--orders N,N] OPTIONS``

OPTIONS are options of ``train.py``. ``--orders`` trains again, in as many
micro-batches, and writes ``FILE-N.npz``. ``--summary`` trains again without recording,
in float32, for ``TIMED_STEPS``, and writes the file that ``train.py --json`` writes.
Rank 0 writes, as ``.npz``:

    losses       [steps]           of the global batches
    names        [tensors]         paths of all weights
    sketches     [steps, tensors]  after each step, for each tensor: the sum of its
                                   elements with fixed random signs (float64)
    sizes        [steps, tensors]  Euclidean norms of the tensors
    final 0 ...                    the weights after the last step
    sha256       scalar            the digest of the state after the last step

A sketch changes with every element of its tensor, so two traces show at which step and
in which tensor two trainings first differ, without keeping every weight of every step.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

from collective import train as cli
from collective.backends.base import Backend
from collective.errors import exit_code
from collective.training.calls import command

TIMED_STEPS = 60


class Trace(keras.callbacks.Callback):
    """Records a training for an ``.npz`` file."""

    def __init__(self) -> None:
        super().__init__()
        self.sketches: list[list[float]] = []
        self.sizes: list[list[float]] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Draw the signs, the same in every run."""
        self.tensors = [*self.model.trainable_variables]
        self.tensors += self.model.non_trainable_variables
        rng = np.random.default_rng(0)
        self.signs = [
            rng.integers(0, 2, tuple(v.shape)).astype(np.int8) * 2 - 1
            for v in self.tensors
        ]

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Add a row for this step."""
        values = [np.asarray(v, np.float64) for v in self.tensors]
        signed = zip(values, self.signs, strict=True)
        self.sketches.append([float(np.sum(v * s)) for v, s in signed])
        self.sizes.append([float(np.linalg.norm(v)) for v in values])

    def write(self, path: Path, losses: list[float], sha256: str) -> None:
        """Write the file."""
        final = {
            f"final {i}": np.asarray(v, np.float64) for i, v in enumerate(self.tensors)
        }
        np.savez(
            path,
            losses=np.array(losses),
            names=np.array([v.path for v in self.tensors]),
            sketches=np.array(self.sketches),
            sizes=np.array(self.sizes),
            sha256=sha256,
            **final,  # type: ignore[arg-type]
        )


def main(arguments: list[str]) -> int:
    """Train; on rank 0, write the recorded training."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("path", type=Path)
    parser.add_argument("--summary")
    parser.add_argument("--orders", default="")
    own, rest = parser.parse_known_args(arguments)
    work = command.TrainingJob.of(vars(cli.parser().parse_args(rest)), test=False)
    backend = command.make_backend(work)
    _train(work, own.path, backend)
    for parts in filter(None, own.orders.split(",")):
        path = own.path.with_name(f"{own.path.stem}-{parts}.npz")
        _train(dataclasses.replace(work, accumulate=int(parts)), path, backend)
    if own.summary:
        precision = "float32" if work.precision == "float64" else work.precision
        timed = dataclasses.replace(work, precision=precision, steps=TIMED_STEPS)
        keras.utils.clear_session()
        summary = command.run(timed, backend=backend)
        if backend.rank == 0:
            summary.write_json(own.summary)
    return 0


def _train(work: command.TrainingJob, path: Path, backend: Backend) -> None:
    keras.utils.clear_session()  # because the names of weights are compared
    trace = Trace()
    summary = command.run(work, callbacks=[trace], backend=backend)
    if backend.rank == 0:
        trace.write(path, summary.losses, summary.state_sha256 or "")


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
