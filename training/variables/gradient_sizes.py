"""How many bytes a step sends through its all-reduce."""

from __future__ import annotations

import math

import keras

SMALL = 64  # elements; tensors up to this size are sent as one


def message(model: keras.Model) -> list[int]:
    """Bytes of each tensor that a step of this model sums, about.

    Gradients, and state that changes in training such as BatchNorm's; of models with
    weighed losses (see ``collective.training.losses``) one set of gradients only.

    Args:
        model: A model that is not built has no known sizes.

    Returns:
        The sizes; empty if they are not known.
    """
    if not model.built:
        return []
    variables = [*model.trainable_variables]
    variables += [v for v in model.non_trainable_variables if _changes(v)]
    width = 8 if any(v.dtype == "float64" for v in variables) else 4
    counts = [math.prod(v.shape) for v in variables]
    small = sum(count for count in counts if count <= SMALL)
    return [width * n for n in (small + 1, *(c for c in counts if c > SMALL))]


def _changes(variable: keras.Variable) -> bool:
    return "seed_generator" not in variable.path
