"""The parts inside Keras and TensorFlow that the training uses, one file for each of theirs.

``private_names`` has their names, and compares the installed versions with them first. Each
function has a test that fails when Keras or TensorFlow changes. Nothing here is about the
mathematics of a step, which is Keras' own.
"""

from collective.training.keras_compat import private_names as private_names  # isort: skip
from collective.training.keras_compat import (
    calls,
    data,
    distribution,
    eager_draws,
    entry_points,
    held_parts,
    layers,
    model,
    one_copy,
    optimizers,
    random_pipelines,
    replica_draws,
    seeds,
    tensorflow_names,
    tracing,
    undone_writes,
    weights_file,
)

__all__ = [
    "calls",
    "data",
    "distribution",
    "eager_draws",
    "entry_points",
    "held_parts",
    "layers",
    "model",
    "one_copy",
    "optimizers",
    "private_names",
    "random_pipelines",
    "replica_draws",
    "seeds",
    "tensorflow_names",
    "tracing",
    "undone_writes",
    "weights_file",
]
