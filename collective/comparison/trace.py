"""Records a training for the equality test.

``python -m collective.comparison.trace FILE [--perturb NAME] OPTIONS``

OPTIONS are those of ``train.py``. Rank 0 writes, as ``.npz``:

    losses       [steps]           of the global batches
    names        [tensors]         paths of all weights
    sketches     [steps, tensors]  after each step, for each tensor: the sum of its
                                   elements with fixed random signs (float64)
    sizes        [steps, tensors]  Euclidean norms of the tensors
    final 0 ...                    the weights after the last step
    by_replicas  scalar            why the model depends on the number of replicas, or ''
    sha256       scalar            the digest of the state after the last step

A sketch changes with every element of its tensor, so two traces show at which step and
in which tensor two trainings first differ, without keeping every weight of every step.
"""

from __future__ import annotations

import sys

import keras
import numpy as np

from collective import train as cli
from collective.comparison import perturbation
from collective.errors import exit_code
from collective.training import command


class Trace(keras.callbacks.Callback):
    """Records a training for an ``.npz`` file."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path
        self.losses: list[float] = []
        self.sketches: list[list[float]] = []
        self.sizes: list[list[float]] = []

    def on_train_begin(self, logs=None):
        """Draws the signs, the same in every run."""
        self.tensors = [*self.model.trainable_variables]
        self.tensors += self.model.non_trainable_variables
        rng = np.random.default_rng(0)
        self.signs = [
            rng.integers(0, 2, tuple(v.shape)).astype(np.int8) * 2 - 1
            for v in self.tensors
        ]

    def on_train_batch_end(self, batch, logs=None):
        """Adds a row for this step."""
        values = [np.asarray(v, np.float64) for v in self.tensors]
        signed = zip(values, self.signs, strict=True)
        self.sketches.append([float(np.sum(v * s)) for v, s in signed])
        self.sizes.append([float(np.linalg.norm(v)) for v in values])

    def write(self, losses: list[float], sha256: str, by_replicas: bool) -> None:
        """Writes the file; ``by_replicas``: a layer may depend on their number."""
        final = {
            f"final {i}": np.asarray(v, np.float64) for i, v in enumerate(self.tensors)
        }
        np.savez(
            self.path,
            losses=np.array(losses),
            names=np.array([v.path for v in self.tensors]),
            sketches=np.array(self.sketches),
            sizes=np.array(self.sizes),
            by_replicas=_by_replicas(self.model) if by_replicas else "",
            sha256=sha256,
            **final,  # type: ignore[arg-type]
        )


def _by_replicas(model: keras.Model) -> str:
    """Returns why N replicas train a different model than one; empty if they do not."""
    layers = list(model._flatten_layers())
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers):
        return "BatchNorm uses the statistics of its replica"
    return ""


def main(arguments: list[str]) -> int:
    """Trains, and writes the trace on rank 0."""
    path, *rest = arguments
    if rest[:1] == ["--perturb"]:
        perturbation.apply(rest[1])
        rest = rest[2:]
    trace = Trace(path)
    work = command.Job.of(vars(cli.parser().parse_args(rest)), test=False)
    summary = command.run(work, callbacks=[trace])
    if trace.sketches:
        trace.write(
            summary.losses,
            summary.state_sha256 or "",
            by_replicas=work.virtual_replicas is None,
        )
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
