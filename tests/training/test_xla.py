"""Where XLA compiles the passes of a step."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from collective import backends, training
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


def make_optimizer(name):
    if name == "scaled":
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    if name == "averaged":
        return keras.optimizers.AdamW(
            0.01, use_ema=True, ema_overwrite_frequency=2, global_clipnorm=0.5
        )
    return keras.optimizers.SGD(0.01, momentum=0.9, clipnorm=0.5)


@pytest.mark.trains
@pytest.mark.parametrize("optimizer", ["momentum", "averaged", "scaled"])
def test_a_compiled_update_is_the_same(optimizer, monkeypatch, clean_keras):
    trained = []
    for compiled in (False, True):
        monkeypatch.setattr(xla, "pays_for_updates", lambda _, is_it=compiled: is_it)
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,), dtype="float64")
        layer = keras.layers.Dense(
            3, "tanh", dtype="float64", kernel_constraint="unit_norm"
        )
        model = keras.Model(inputs, layer(inputs))
        model.compile(make_optimizer(optimizer), "mse")
        numbers = np.random.default_rng(2)
        data = numbers.normal(size=(30, 4)), numbers.normal(size=(30, 3))
        training.fit(
            model, data, backend=backends.get("single"), global_batch_size=8,
            epochs=2, jit_compile=True, verbose=0,
        )  # fmt: skip
        trained.append(
            [*model.get_weights(), *map(np.asarray, model.optimizer.variables)]
        )
    for one, other in zip(*trained, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)
