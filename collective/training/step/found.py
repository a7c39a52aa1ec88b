"""What tracing a forward and backward pass finds out about a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import tensorflow as tf

from collective.training.keras_compat import SeedUse


class LookUps(NamedTuple):
    """The gradients of one variable's look-ups in the global batch."""

    slices: tf.IndexedSlices
    total: int  # number of the loss total that they are of: 0 for the divided part
    added: bool  # whether the optimizer sees their sum for each row of the variable


@dataclass(frozen=True)
class Found:
    """The record of one trace. Variables are indices of ``PreparedModel.trainable``."""

    connected: tuple[int, ...] = ()  # variables that the loss depends on
    # Those of them whose gradient has rows of look-ups, each of which may come several
    # times: they are added up.
    combined: tuple[int, ...] = ()
    # Look-ups of a row of the batch, by variable; known where the pass runs eagerly.
    counted: Mapping[int, int] = field(default_factory=dict)
    # Gradients of single look-ups, by variable; none of them is in ``connected``.
    # Tensors of the graph that was traced.
    look_ups: Mapping[int, LookUps] = field(default_factory=dict)
    # Variables whose gradient is their new value (scales of float8 layers); none of
    # them is in ``connected``.
    overwritten: tuple[int, ...] = ()
    # Indices of ``PreparedModel.state`` that the model assigns.
    changing: tuple[int, ...] = ()
    assigned: tuple[int, ...] = ()  # variables that the model assigns
    has_divided: bool = True  # whether the divided part of the loss has a gradient
    # Paths of what a test assigns, and the model does not keep.
    dropped: tuple[str, ...] = ()
    # Generators to count up after the step.
    seeds: SeedUse = field(default_factory=SeedUse)
    # What is drawn otherwise than in one process, a few words each.
    draws: tuple[str, ...] = ()
