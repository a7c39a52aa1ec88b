"""A model that is trained again and again is traced once, as in Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from collective.training.keras_compat.tensorflow_names import determinism
from tests import launch
from tests.training.small import NAMES, on_rank_zero
from tests.training.test_equivalence import together

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.trains]


@pytest.fixture(params=NAMES)
def backend(request, backends_by_name):
    keras.config.set_floatx("float64")
    return backends_by_name(request.param)


class Counted(keras.layers.Dense):
    """Counts how often its call was traced."""

    calls = 0

    def call(self, x, training=None):
        type(self).calls += 1
        return super().call(x)


def made():
    keras.utils.set_random_seed(3)
    layers = [Counted(5, "tanh"), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.2, seed=1), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def rows():
    rng = np.random.default_rng(0)
    return rng.normal(size=(23, 4)), rng.normal(size=(23, 2))


def program(model, fit):
    """Train again after each change that Keras allows in between."""
    Counted.calls = 0  # rank 0 may also train alone, and ranks compare classes
    x, y = rows()
    words = {"batch_size": 8, "shuffle": False, "verbose": 0}
    words["validation_data"] = (x[:9], y[:9])
    counts, losses = [], []

    def run(**more):
        before = Counted.calls
        losses.append(fit(model, x, y, **words, **more).history)
        counts.append(Counted.calls - before)

    run()
    run(epochs=2)
    model.optimizer.learning_rate = 0.01
    model.layers[-1].set_weights([w * 0.5 for w in model.layers[-1].get_weights()])
    run(initial_epoch=3, epochs=4)
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.1), "mae", metrics=["mse"])
    run()
    run()
    return [np.array(v) for v in model.weights], losses, counts


def test_trained_again_it_is_not_traced_again(backend):
    def stock():
        return program(made(), keras.Model.fit)

    wanted, histories, _ = on_rank_zero(backend, stock)

    def ours():
        with backend.scope():
            model = made()
        fit = lambda *a, **k: collective.fit(*a, backend=backend, **k)  # noqa: E731
        return program(model, fit)

    got, found, counts = together(backend, ours)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11)
    for one, other in zip(found, histories, strict=True):
        assert set(one) == set(other)
        for name, values in other.items():
            np.testing.assert_allclose(one[name], values, rtol=1e-9)
    assert counts[0] and counts[3]
    assert counts[1] == counts[2] == counts[4] == 0


@pytest.mark.skipif(launch.launched(), reason="one process shows it")
def test_determinism_is_switched_on_between_two_trainings(backends_by_name):
    """What was traced before reads a clock that TensorFlow then refuses."""
    (x, y), three = rows(), backends_by_name("tf-mirrored:3")
    with three.scope():
        model = made()
    before = determinism.is_enabled()
    try:
        collective.fit(model, x, y, backend=three, verbose=0)
        tf.config.experimental.enable_op_determinism()
        collective.fit(model, x, y, backend=three, verbose=0)
    finally:
        determinism.enable(before)


def test_a_backend_of_a_name_is_opened_once():
    model, (x, y) = made(), rows()
    opened = [
        collective.fit(model, x, y, backend="single", verbose=0).backend for _ in "ab"
    ]
    assert opened[0] is opened[1]
