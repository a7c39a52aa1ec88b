"""What the training takes from inside Keras and TensorFlow, one file for each neighbour.

``private_names`` has the names, and compares what is installed with them first. Each
function has a test that fails when a neighbour changes. Nothing here is about the
mathematics of a step, which is Keras' own.
"""

from collective.training.keras_compat import private_names as private_names  # isort: skip
from collective.training.keras_compat import (
    calls,
    data,
    distribution,
    eager_draws,
    entry_points,
    layers,
    model,
    one_copy,
    optimizers,
    replica_draws,
    seeds,
    tensorflow_names,
    tracing,
    undone_writes,
    weights_file,
    whole_variables,
)

__all__ = [
    "calls",
    "data",
    "distribution",
    "eager_draws",
    "entry_points",
    "layers",
    "model",
    "one_copy",
    "optimizers",
    "private_names",
    "replica_draws",
    "seeds",
    "tensorflow_names",
    "tracing",
    "undone_writes",
    "weights_file",
    "whole_variables",
]
