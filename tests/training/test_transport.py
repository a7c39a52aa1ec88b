"""With ``--transport-dtype`` gradients travel in 16 bits, and nothing else does.

Plain, this file starts itself on two ranks.
"""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from collective import backends
from collective.backends.options import Options
from collective.backends.single import SingleBackend
from collective.environment import Environment
from tests import launch
from tests.training.small import on_rank_zero

pytestmark = pytest.mark.usefixtures("clean_keras")
NAME = os.environ.get(launch.BACKEND, "single")
ROWS, WIDTH = 23, 80  # a last batch of 7 rows; kernels large enough to be rounded


class Clips(keras.Model):
    """Clips its gradients itself, so the optimizer's gradients are not sums over rows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.1)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


def make(kind=keras.Model):
    """Return a model whose moments and kernels have more than 64 numbers."""
    keras.utils.set_random_seed(3)
    given = keras.Input((WIDTH,))
    x = keras.layers.Dense(WIDTH, activation="tanh")(given)
    x = keras.layers.BatchNormalization()(x)
    model = kind(given, keras.layers.Dense(WIDTH)(x))
    metrics = ["mae"] if kind is keras.Model else None
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=metrics)
    return model


def data():
    numbers = np.random.default_rng(1)
    return [numbers.normal(size=(ROWS, WIDTH)).astype("float32") for _ in range(2)]


class InFloat16(SingleBackend):
    """Records the gradients that it rounds."""

    rounds_to = "float16"

    def __init__(self):
        super().__init__(Options(), Environment())
        self.shapes, self.others = [], []

    def all_reduce(self, tensors, rounded=()):
        for i, tensor in enumerate(tensors):
            found = self.shapes if i in rounded else self.others
            found.append(tuple(tensor.shape))
        return tensors


@pytest.mark.skipif(NAME != "single", reason="for one process")
@pytest.mark.parametrize("kind", [keras.Model, Clips])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_alone_are_rounded(kind, accumulate):
    backend = InFloat16()
    collective.fit(
        make(kind), *data(), batch_size=8, verbose=0, backend=backend,
        accumulate=accumulate,
    )  # fmt: skip
    # Gamma's gradient is not a sum over rows: it comes from sums that travel exactly.
    kernels, vectors = [(WIDTH, WIDTH)] * 2, [(WIDTH,)] * 3
    assert sorted(backend.shapes) == sorted([*kernels, *vectors])
    assert (WIDTH, WIDTH) not in backend.others
    assert backend.others.count((WIDTH,)) >= 1  # moments


@pytest.mark.on_ranks
@pytest.mark.skipif(NAME == "single", reason="for ranks")
def test_one_step_differs_in_the_kernels_alone():
    """On ranks losses, metrics and moments are exact, and kernels are nearly exact."""
    exact, rounded = (
        backends.get("native", Options(transport_dtype=dtype))
        for dtype in (None, "bfloat16")
    )
    one = collective.fit(make(), *data(), batch_size=ROWS, verbose=0, backend=exact)
    two = collective.fit(make(), *data(), batch_size=ROWS, verbose=0, backend=rounded)
    assert one.history == two.history
    names = [v.path for v in one.model.variables if "moving" in v.path]
    kernels = 0
    for a, b in zip(one.model.variables, two.model.variables, strict=True):
        if any(a.path == name for name in names):
            np.testing.assert_array_equal(a, b)
        elif a.path.endswith("kernel"):
            kernels += not np.array_equal(a, b)
            np.testing.assert_allclose(a, b, atol=1e-3)
    assert len(names) == 2 and kernels == 2

    def stock():
        model = make()
        model.fit(*data(), batch_size=ROWS, verbose=0)
        return model.get_weights()

    for a, b in zip(one.model.get_weights(), on_rank_zero(exact, stock), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.on_ranks
@pytest.mark.skipif(NAME == "single", reason="for ranks")
def test_a_scaled_sum_overflows_as_in_one_process():
    """At one scale the gradients of both ranks are finite in float16, and their sum is not."""
    x, y = (
        np.abs(data()[0]) + 0.5,
        np.zeros((ROWS, 1)),
    )  # every row adds to each gradient
    given = {"batch_size": ROWS, "verbose": 0, "shuffle": False}
    stock, ours, cut = (scaled() for _ in range(3))
    kept = []
    for exponent in range(5, 9):
        for model in (stock, ours, cut):
            model.set_weights(weights := scaled().get_weights())
            model.optimizer.dynamic_scale.assign(2.0**exponent)
        stock.fit(x, y, **given)
        collective.fit(ours, x, y, **given, backend=NAME)
        collective.fit(cut, x, y, **given, backend=NAME, shard_optimizer=True)
        kept.append(np.array_equal(stock.get_weights()[0], weights[0]))
        for model in (ours, cut):
            scale = float(model.optimizer.dynamic_scale)
            assert scale == float(stock.optimizer.dynamic_scale)
            for a, b in zip(model.get_weights(), stock.get_weights(), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert not kept[0] and kept[-1]  # so a scale between them is the one


def scaled():
    """Return a model that computes in float16."""
    keras.utils.set_random_seed(3)
    given = keras.Input((WIDTH,))
    hidden = keras.layers.Dense(1, kernel_initializer="ones", dtype="mixed_float16")(
        given
    )
    model = keras.Model(given, keras.layers.Activation("linear")(hidden))
    optimizer = keras.optimizers.SGD(1e-5, momentum=0.9)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer), "mse")
    model.optimizer.build(model.trainable_variables)
    return model
