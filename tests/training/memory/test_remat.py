"""``keras.remat``, which replaced an option of ours."""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest

import collective
from tests import launch
from tests.training.small import on_rank_zero

NAME = os.environ.get(launch.BACKEND, "single")
pytestmark = [
    pytest.mark.usefixtures("clean_keras"),
    pytest.mark.skipif(not hasattr(keras, "remat"), reason="an older Keras"),
]


class Block(keras.layers.Layer):
    """Has two layers that are computed again in the backward pass."""

    def __init__(self, again: bool):
        super().__init__()
        self.one = keras.layers.Dense(16, activation="tanh")
        self.two = keras.layers.Dense(8, activation="tanh")
        self.again = again

    def build(self, shape):
        self.one.build(shape)
        self.two.build((*shape[:-1], 16))

    def call(self, x):
        def both(x):
            return self.two(self.one(x))

        return keras.remat(both)(x) if self.again else both(x)


def make(again: bool = True) -> keras.Model:
    keras.utils.set_random_seed(4)
    given = keras.Input((6,))
    x = keras.layers.Dropout(0.3)(Block(again)(given))
    model = keras.Model(given, keras.layers.Dense(2)(x))
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.5), "mse", metrics=["mae"])
    return model


def data() -> list[np.ndarray]:
    numbers = np.random.default_rng(1)
    return [numbers.normal(size=(23, 6)), numbers.normal(size=(23, 2))]


@pytest.mark.on_ranks
@pytest.mark.parametrize("accumulate", [1, 2])
def test_trains_what_keras_trains(accumulate, backends_by_name):
    keras.config.set_floatx("float64")
    backend = backends_by_name(NAME)
    options = {"batch_size": 8, "epochs": 2, "verbose": 0}

    def stock():
        model = make(again=False)
        history = model.fit(*data(), **options)
        return model.get_weights(), history.history

    weights, history = on_rank_zero(backend, stock)
    got = collective.fit(
        make(), *data(), backend=backend, accumulate=accumulate, **options
    )
    for a, b in zip(got.model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    for name, values in history.items():
        np.testing.assert_allclose(got.history[name], values, rtol=1e-12)
