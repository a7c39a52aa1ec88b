"""The record of a program, and rows for its training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

FEATURES, CLASSES, WORDS, LENGTH = 4, 3, 7, 5
ROWS, BATCH, EPOCHS = 23, 10, 2  # batches of 10, 10 and 3 rows
VALIDATED = 7  # one batch, because Keras averages some metrics over batches


@dataclass(frozen=True)
class Program:
    """A program and its compared values.

    Attributes:
        make: Makes the compiled model.
        data: Makes ``x, y`` or ``x, y, sample_weight`` from a number of rows and a seed.
        floatx: The precision.
        tolerance: Relative to the largest entry of each tensor.
        validates: Whether validation is compared, too.
        callbacks: Makes the callbacks of one training of a model.
    """

    make: Callable[[], keras.Model]
    data: Callable[[int, int], tuple[Any, ...]] = field(
        default=lambda n, s: numbers(n, s)
    )
    floatx: str = "float64"
    tolerance: float = 1e-10
    validates: bool = True
    callbacks: Callable[[keras.Model], list[Any]] = field(default=lambda model: [])


def numbers(rows: int, seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES)).astype(keras.config.floatx())
    return x, rng.normal(size=(rows, CLASSES)).astype(x.dtype)


def weighted(rows: int, seed: int) -> tuple[Any, ...]:
    weight = np.random.default_rng(seed + 9).exponential(size=rows)
    return (*numbers(rows, seed), weight.astype(keras.config.floatx()))


def words(rows: int, seed: int) -> tuple[Any, ...]:
    """Return sentences of unequal length, ended by zeros; the next word is the label."""
    rng = np.random.default_rng(seed)
    text = rng.integers(1, WORDS, (rows, LENGTH + 1))
    text[np.arange(LENGTH + 1) >= rng.integers(2, LENGTH + 2, rows)[:, None]] = 0
    return text[:, :-1].astype("int32"), text[:, 1:].astype("int32")


def made(program: Program) -> keras.Model:
    """Return the program's model, with weights."""
    keras.utils.set_random_seed(3)
    model = program.make()
    x, *_ = program.data(2, 1)
    model(x)  # this makes the weights of both, from the seed
    return model
