"""Small models, and what the check of the step finds about them on one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from collective import backends
from collective.errors import UsageError
from collective.training.input.pipeline import Input
from collective.training.prepare import prepare
from collective.training.step.plan import StepPlan
from collective.training.verification import verify_step

PIECES = 3
ROWS, FEATURES, OUTPUTS = 24, 6, 3


def data(labels: bool = False):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, FEATURES)).astype("float32")
    y = rng.integers(0, OUTPUTS, ROWS)
    return x, y.astype("int32") if labels else np.eye(OUTPUTS, dtype="float32")[y]


def network(*more, loss="mse", activation=None, optimizer="adam", **settings):
    keras.utils.set_random_seed(5)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(8, "tanh"), *more]
    model = keras.Sequential([*layers, keras.layers.Dense(OUTPUTS, activation)])
    model.compile(optimizer, loss, **settings)
    return model


def variables(model) -> list[np.ndarray]:
    found = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.array(v) for v in found]


def verified(model, given=None, *, pieces=PIECES, **more) -> StepPlan:
    """The plan; no variable has changed, whether there is one or an error."""
    backend = backends.get("single")
    inputs = Input(data() if given is None else given, 16)
    prepared = prepare(model, backend, inputs.spec, micro_batch_rows=8)
    before = variables(model)
    try:
        return verify_step(prepared, backend, inputs, inputs, pieces=pieces, **more)
    finally:
        after = variables(model)
        assert all(map(np.array_equal, before, after))


def refused(model, message: str, given=None, *, pieces=PIECES, **more) -> None:
    with pytest.raises(UsageError, match=message) as error:
        verified(model, given, pieces=pieces, **more)
    assert "verify=False" in error.value.hint and error.value.everywhere
