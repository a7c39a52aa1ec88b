"""Small models, and what the check of the step finds about them on one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

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


class Contrast(keras.layers.Layer):
    """Compares each row with all others."""

    def call(self, x):
        logits = ops.matmul(x, ops.transpose(x))
        targets = ops.arange(ops.shape(x)[0])
        self.add_loss(
            ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    targets, logits, from_logits=True
                )
            )
        )
        return x


class Penalty(keras.layers.Layer):
    """Adds the sum, or the mean, of squares over the batch."""

    def __init__(self, reduce, **kwargs):
        super().__init__(**kwargs)
        self.reduce = reduce

    def call(self, x):
        self.add_loss(0.1 * self.reduce(x**2))
        return x


class Center(keras.layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class State(keras.layers.Layer):
    """Changes a state by a function of the rows."""

    def __init__(self, change, **kwargs):
        super().__init__(**kwargs)
        self.change = change

    def build(self, shape):
        self.state = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="state"
        )

    def call(self, x, training=False):
        if training:
            self.state.assign(self.change(self.state, x))
        return x


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
