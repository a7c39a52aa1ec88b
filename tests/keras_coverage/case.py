"""One object of Keras in a small model, and the results of its training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import collective
from collective.log import log

# Batches of 5, 5 and 2 rows: one of three ranks has no row of the last batch.
ROWS, BATCH = 12, 5


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        build: Makes the input and the output of the model.
        data: Makes ``x, y`` of so many rows.
        loss, metrics: Make the losses and metrics of the output.
        optimizer: Makes the optimizer, if it differs from the default.
        tolerance: Relative to the largest entry of each tensor, or to one.
        floatx: The precision.
    """

    build: Callable[[], tuple[Any, Any]]
    data: Callable[[int], tuple[Any, Any]]
    loss: Callable[[], Any] = lambda: "mean_squared_error"
    metrics: Callable[[], list[Any]] = lambda: ["mean_absolute_error"]
    optimizer: Callable[[], Any] | None = None
    tolerance: float = 1e-10
    floatx: str = "float64"


def signed(*shape: int) -> Callable[[int], np.ndarray]:
    """Make numbers of both signs, of so many rows."""
    return lambda rows: np.random.default_rng(1).normal(size=(rows, *shape))


def between(low: float, high: float, *shape: int) -> Callable[[int], np.ndarray]:
    """Make numbers in this range."""
    return lambda rows: np.random.default_rng(2).uniform(low, high, (rows, *shape))


def below(most: int, *shape: int) -> Callable[[int], np.ndarray]:
    """Make whole numbers from 0 on."""
    return lambda rows: (
        np.random.default_rng(3).integers(0, most, (rows, *shape)).astype("int32")
    )


def one_hot(classes: int) -> Callable[[int], np.ndarray]:
    """Make labels."""
    return lambda rows: np.eye(classes)[below(classes)(rows)]


def _compiled(cases: Sequence[Case]) -> keras.Model:
    """Return one model of all cases, in parallel."""
    pairs = [case.build() for case in cases]
    inputs, outputs = map(list, zip(*pairs, strict=True))
    model = keras.Model(inputs, outputs, name="model")
    # With SGD, the update of a gradient of zero is not larger than its rounding.
    of_all = lambda: keras.optimizers.SGD(0.05, momentum=0.9)  # noqa: E731
    model.compile(
        optimizer=(cases[0].optimizer or of_all)(),
        loss=[case.loss() for case in cases],
        metrics=[case.metrics() for case in cases],
    )
    model.optimizer.build(model.trainable_variables)  # otherwise a step is traced twice
    return model


class _Lines(logging.Handler):
    """Collects the lines of ``--explain``."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def outcome(
    cases: Sequence[Case], backend: Any = None
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Train and evaluate, by stock Keras without a backend; return the results.

    Returns:
        Arrays by name, and the lines that explain the steps.
    """
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx(cases[0].floatx)
    keras.utils.set_random_seed(5)
    model = _compiled(cases)
    x, y = map(list, zip(*(case.data(ROWS) for case in cases), strict=True))
    options: dict[str, Any] = {"batch_size": BATCH, "verbose": 0}
    kept = _Lines()
    log.addHandler(kept)
    try:
        if backend is None:
            logs = model.fit(x, y, shuffle=False, **options).history
            score = model.evaluate(x, y, **options)
        else:
            options["backend"] = backend
            logs = collective.fit(model, x, y, shuffle=False, **options).history
            score = collective.evaluate(model, x, y, **options)
    finally:
        log.removeHandler(kept)
    values = {
        f"{name} {i}": np.asarray(value)
        for name, found in {**logs, "evaluate": score}.items()
        for i, value in enumerate(tf.nest.flatten(found))
    }
    variables = [*model.variables, *model.optimizer.variables]
    for i, variable in enumerate(variables):
        values[f"{i} {variable.path}"] = np.array(variable)
    return values, kept.lines


def differences(
    got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float
) -> list[str]:
    """Return differences beyond the tolerance; empty if there are none."""
    if len(got) != len(wanted):
        return [f"{sorted(got)} is not {sorted(wanted)}"]
    found = []
    # By order, because the names of a process's second model have other numbers.
    for (name, reference), value in zip(wanted.items(), got.values(), strict=True):
        if reference.dtype.kind not in "fc":
            error = 0.0 if np.array_equal(value, reference) else np.inf
        elif not np.array_equal(np.isfinite(value), np.isfinite(reference)):
            error = np.inf
        else:
            is_finite = np.isfinite(reference)
            apart = np.abs(value - reference)[is_finite]
            scale = max(np.abs(reference[is_finite]).max(initial=0), 1.0)
            error = apart.max(initial=0) / scale
        if not error <= tolerance:
            found.append(f"{name}: {error:.2g} of {reference!r}, got {value!r}")
    return found
