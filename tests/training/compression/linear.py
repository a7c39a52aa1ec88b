"""A linear model with PowerSGD, by us and by NumPy alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

import collective
from collective.training.compression import PowerSGD
from collective.training.input.plan import share

FEATURES, OUTPUTS = 12, 10
ROWS, BATCH = 53, 10  # five batches of ten rows, and one of three
PER_EPOCH = 6
RATE = 0.5
HOOK = PowerSGD(rank=2)
KERNEL = 0  # index of the kernel among the trainable variables


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, labels and weights; all rows differ."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, FEATURES))
    y = x @ rng.normal(size=(FEATURES, OUTPUTS)) + rng.normal(size=(ROWS, OUTPUTS))
    return x, y, rng.uniform(0.1, 2.0, size=ROWS)


def model(weighted: bool = False) -> keras.Model:
    """Return a model in float64. With weights, the data give the divisor of the loss."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(2)
    made = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(OUTPUTS)])
    reduction = "mean_with_sample_weight" if weighted else "sum_over_batch_size"
    made.compile(
        keras.optimizers.SGD(RATE), keras.losses.MeanSquaredError(reduction=reduction)
    )
    return made


def train(backend: Any, steps: int, weighted: bool = False, **more: Any) -> Any:
    """Train with ``collective.fit``, by default with the hook."""
    x, y, weights = data()
    words = {"hook": HOOK, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    if weighted:
        words["sample_weight"] = weights
    return collective.fit(
        model(weighted), x, y, backend=backend, steps=steps, **(words | more)
    )


class Trained(NamedTuple):
    """The state of the reference after some steps; ``errors`` by replica."""

    losses: list[float]
    kernel: np.ndarray
    bias: np.ndarray
    errors: list[np.ndarray]


def reference(
    replicas: int,
    steps: int,
    weighted: bool = False,
    changes: Mapping[int, Callable[[list[np.ndarray]], list[np.ndarray]]] | None = None,
) -> Trained:
    """Train with PowerSGD on some replicas, in NumPy.

    Args:
        changes: By step: makes the errors of another number of replicas before that step.
    """
    x, y, weights = data()
    weights = weights if weighted else np.ones(ROWS)
    kernel, bias = (v.numpy() for v in model().trainable_variables)
    (q,) = HOOK.start((FEATURES, OUTPUTS), KERNEL)
    errors = [np.zeros((FEATURES, OUTPUTS)) for _ in range(replicas)]
    losses = []
    for step in range(steps):
        errors = (changes or {}).get(step, lambda before: before)(errors)
        first = step % PER_EPOCH * BATCH
        rows = range(first, min(first + BATCH, ROWS))
        divisor = OUTPUTS * weights[rows].sum()
        ms, biases, loss = [], 0.0, 0.0
        for number, error in enumerate(errors):
            start, stop = share(len(rows), number, len(errors))
            own = rows[start:stop]
            residual = x[own] @ kernel + bias - y[own]
            weighed = weights[own][:, None] * residual
            ms.append(error + 2 * x[own].T @ weighed / divisor)
            biases = biases + 2 * weighed.sum(axis=0) / divisor
            loss += np.sum(weighed * residual) / divisor
        basis, _ = np.linalg.qr(sum(m @ q for m in ms))
        factors = [m.T @ basis for m in ms]
        q = sum(factors)
        errors = [m - basis @ f.T for m, f in zip(ms, factors, strict=True)]
        kernel = kernel - RATE * basis @ q.T
        bias = bias - RATE * biases
        losses.append(loss)
    return Trained(losses, kernel, bias, errors)
