"""What tracing a forward and backward pass finds out about a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import tensorflow as tf

from collective.training.keras_compat import SeedUse


class LookUps(NamedTuple):
    """The gradients of one variable's look-ups in the global batch.

    Attributes:
        total: Number of the loss total that they are of: 0 for the divided part.
        added: Whether the optimizer sees their sum for each row of the variable.
    """

    slices: tf.IndexedSlices
    total: int
    added: bool


@dataclass(frozen=True)
class Found:
    """The record of one trace. Variables are indices of ``PreparedModel.trainable``.

    Attributes:
        connected: Variables that the loss depends on.
        combined: Those of them whose gradient has rows of look-ups, each of which may
            come several times: they are added up.
        counted: Look-ups of a row of the batch, by variable; known where the pass runs
            eagerly.
        look_ups: Gradients of single look-ups, by variable; none of them is in
            ``connected``. Tensors of the graph that was traced.
        overwritten: Variables whose gradient is their new value (scales of float8
            layers); none of them is in ``connected``.
        changing: Indices of ``PreparedModel.state`` that the model assigns.
        assigned: Variables that the model assigns.
        has_divided: Whether the divided part of the loss has a gradient.
        dropped: Paths of what a test assigns, and the model does not keep.
        seeds: Generators to count up after the step.
        draws: What is drawn otherwise than in one process, a few words each.
    """

    connected: tuple[int, ...] = ()
    combined: tuple[int, ...] = ()
    counted: Mapping[int, int] = field(default_factory=dict)
    look_ups: Mapping[int, LookUps] = field(default_factory=dict)
    overwritten: tuple[int, ...] = ()
    changing: tuple[int, ...] = ()
    assigned: tuple[int, ...] = ()
    has_divided: bool = True
    dropped: tuple[str, ...] = ()
    seeds: SeedUse = field(default_factory=SeedUse)
    draws: tuple[str, ...] = ()
