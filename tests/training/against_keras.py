"""A Keras program trained by stock Keras and by us, and what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from collective.training import fit

FEATURES, CLASSES, WORDS, LENGTH = 4, 3, 7, 5
ROWS, BATCH, EPOCHS = 23, 10, 2  # batches of 10, 10 and 3 rows
VALIDATED = 7  # one batch: Keras averages some metrics over batches


@dataclass(frozen=True)
class Program:
    """A program and what of it is compared.

    Attributes:
        make: Makes the compiled model.
        data: Makes ``x, y`` or ``x, y, sample_weight``: of a number of rows, a seed.
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
    """Sentences of unequal length, ended by zeros; the next word is the label."""
    rng = np.random.default_rng(seed)
    text = rng.integers(1, WORDS, (rows, LENGTH + 1))
    text[np.arange(LENGTH + 1) >= rng.integers(2, LENGTH + 2, rows)[:, None]] = 0
    return text[:, :-1].astype("int32"), text[:, 1:].astype("int32")


def trained_by_keras(program: Program) -> dict[str, np.ndarray]:
    """History and variables by ``model.fit``."""
    model = _made(program)
    *parts, more = _data(program)
    x, y, *weight = parts
    history = model.fit(
        x,
        y,
        BATCH,
        EPOCHS,
        sample_weight=weight[0] if weight else None,
        shuffle=False,
        verbose=0,
        validation_data=more,
        validation_batch_size=VALIDATED,
        callbacks=program.callbacks(model),
    ).history
    return _outcome(model, history)


def trained_by_us(
    program: Program, backend: Any, accumulate: int = 1, **more: Any
) -> dict[str, np.ndarray]:
    """The same by ``collective.training.fit``."""
    with backend.scope():
        model = _made(program)
    *parts, validation = _data(program)
    result = fit(
        model,
        tuple(parts),
        backend=backend,
        global_batch_size=BATCH,
        epochs=EPOCHS,
        accumulate=accumulate,
        shuffle=False,
        verbose=0,
        validation_data=validation,
        callbacks=program.callbacks(model),
        **more,
    )
    return _outcome(model, result.history)


def differences(
    program: Program, got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]
) -> list[str]:
    """What is further apart than the program's tolerance; empty when nothing is."""
    assert set(got) == set(wanted)
    found = []
    for name, reference in wanted.items():
        if got[name].dtype.kind in "iub":
            error = 0.0 if np.array_equal(got[name], reference) else np.inf
        else:
            scale = np.abs(reference).max(initial=0) or 1
            error = np.abs(got[name] - reference).max(initial=0) / scale
        if not error <= program.tolerance:
            found.append(f"{name}: {error:.2g} of {reference!r}, got {got[name]!r}")
    return found


def _made(program: Program) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = program.make()
    x, *_ = program.data(2, 1)
    model(x)  # the weights of both are made here, from the seed
    return model


def _data(program: Program) -> tuple[Any, ...]:
    more = program.data(VALIDATED, 2) if program.validates else None
    return (*program.data(ROWS, 1), more)


def _outcome(model: keras.Model, history: dict[str, Any]) -> dict[str, np.ndarray]:
    logs = {f"log {name}": np.array(values) for name, values in history.items()}
    variables = {
        f"{i} {v.name}": np.array(v)
        for i, v in enumerate(model.variables)
        if "seed_generator" not in v.path
    }
    return logs | variables
