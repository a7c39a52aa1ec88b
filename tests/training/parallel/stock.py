"""Compares a training of a backend with stock Keras in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from collective.training import evaluate, fit, predict
from collective.training.model.prepared import get_partition

BATCH, EPOCHS = 7, 3


def assert_close(got: Any, wanted: Any) -> None:
    """Check equality except for the order of sums, in float64."""
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


def weights(trained: keras.Model) -> list[tuple[str, np.ndarray]]:
    """Return all variables of a model and its optimizer, unsharded; every rank calls it."""
    parts = get_partition(trained)
    whole = {} if parts is None else parts.gather(everywhere=True)
    every = [*trained.weights, *trained.optimizer.variables]
    return [(v.path, np.asarray(whole.get(id(v), v))) for v in every]


def assert_as_keras(
    make: Callable[[], keras.Model], rows: Any, backend: Any, **options: Any
) -> None:
    """Check that a training, and the trained model's results, equal stock Keras.

    Args:
        rows: ``x, y``, of which the last third validates.
        options: Options of ``collective.fit``, or ``sample_weight``.
    """
    keras.config.set_floatx("float64")
    keras.utils.clear_session(free_memory=False)
    wanted, (x, y) = make(), rows
    words = {"batch_size": BATCH, "verbose": 0}
    fits = {"epochs": EPOCHS, "shuffle": False, "validation_split": 0.3} | words
    fits["sample_weight"] = options.pop("sample_weight", None)
    history = wanted.fit(x, y, **fits).history
    keras.utils.clear_session(free_memory=False)
    got = fit(make, x, y, backend=backend, check_every=3, **fits, **options)
    assert sorted(got.history) == sorted(history)
    for key, values in history.items():
        np.testing.assert_allclose(got.history[key], values, rtol=1e-11)
    pairs = zip(weights(got.model), weights(wanted), strict=True)
    for (path, one), (_, other) in pairs:
        # Adam divides the rounding of a zero gradient by its own size.
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11, err_msg=path)
    assert_close(
        evaluate(got.model, x, y, backend=backend, **words),
        wanted.evaluate(x, y, **words),
    )
    assert_close(
        predict(got.model, x, backend=backend, **words), wanted.predict(x, **words)
    )
