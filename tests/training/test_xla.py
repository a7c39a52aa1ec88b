"""Where XLA compiles the passes of a step."""

from __future__ import annotations

import keras
import pytest

from collective import backends
from collective.training.step import xla


@pytest.mark.parametrize(
    ("wanted", "compiled", "features", "expected"),
    [
        (None, True, (), True),
        (None, "auto", (), False),  # Keras' own default where there is no GPU
        (None, True, ("tensor_parallel",), False),  # that it does not work with
        (True, False, (), True),
        (False, True, (), False),
    ],
)
def test_chosen(wanted, compiled, features, expected):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=compiled)
    backend = backends.get("single")
    assert xla.chosen(wanted, model, backend, features) is expected
