"""Layers that couple rows, computed on the rows of all replicas: as stock Keras trains.

Plain, this file runs on one replica; then it starts itself on ranks of ``native``.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

from collective.errors import UsageError
from collective.training.step.plan import StepPlan
from tests import launch
from tests.training.coupled.compared import NAMES, assert_same, planned, stock

HERE = "tests/training/coupled/test_whole_layers.py"
FEATURES, OUTPUTS = 5, 3

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.on_ranks]


@pytest.fixture(params=NAMES)
def backend(request, backends_by_name):
    keras.config.set_floatx("float64")
    return backends_by_name(request.param)


def rows(count, seed=3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, FEATURES)), rng.normal(size=(count, OUTPUTS))


class Experts(keras.layers.Layer):
    """A mixture with the balance term of the Switch Transformer: coupled by ``add_loss``."""

    def build(self, shape):
        self.gate = keras.layers.Dense(4, activation="softmax")
        self.experts = [keras.layers.Dense(6) for _ in range(4)]
        for layer in (self.gate, *self.experts):
            layer.build(shape)

    def call(self, x):
        shares = self.gate(x)
        chosen = ops.one_hot(ops.argmax(shares, -1), 4, dtype=shares.dtype)
        self.add_loss(0.4 * ops.sum(ops.mean(shares, 0) * ops.mean(chosen, 0)))
        made = ops.stack([expert(x) for expert in self.experts], 1)
        return ops.sum(made * shares[:, :, None], 1)


class Renormalized(keras.layers.Layer):
    """Batch renormalization: coupled by what it returns, and by its state."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], trainable=False, name="mean")
        self.scale = self.add_weight(
            shape=shape[1:], initializer="ones", trainable=False, name="scale"
        )

    def call(self, x, training=False):
        if not training:
            return (x - self.mean) / self.scale
        mean, scale = ops.mean(x, 0), ops.sqrt(ops.var(x, 0) + 1e-3)
        r = ops.stop_gradient(ops.clip(scale / self.scale, 0.3, 3))
        d = ops.stop_gradient(ops.clip((mean - self.mean) / self.scale, -5, 5))
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        self.scale.assign(0.9 * self.scale + 0.1 * scale)
        return (x - mean) / scale * r + d


class Centres(keras.layers.Layer):
    """Center loss: its state counts the rows of each class."""

    def build(self, shape):
        shape = (OUTPUTS, shape[-1])
        self.centres = self.add_weight(shape=shape, trainable=False, name="centres")

    def call(self, x, training=False):
        of_class = ops.one_hot(ops.argmax(x[:, :OUTPUTS], -1), OUTPUTS, dtype=x.dtype)
        apart = x - ops.matmul(of_class, ops.stop_gradient(self.centres))
        self.add_loss(0.1 * ops.mean(ops.square(apart)))
        total = ops.matmul(ops.transpose(of_class), ops.stop_gradient(x))
        count = ops.sum(of_class, 0)[:, None]
        if training:
            moved = 0.5 * (total - count * self.centres) / (count + 1)
            self.centres.assign(self.centres + moved)
        return x


class Graph(keras.layers.Layer):
    """Attention over the rows of a batch, with weights."""

    def build(self, shape):
        self.dense = keras.layers.Dense(6)
        self.dense.build(shape)

    def call(self, x):
        near = ops.softmax(ops.matmul(x, ops.transpose(x)), -1)
        return ops.matmul(near, self.dense(x))


class Sums(keras.layers.Layer):
    """Adds a sum over rows to the loss."""

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class Noise(Graph):
    def call(self, x):
        return super().call(x + keras.random.normal(ops.shape(x), dtype=x.dtype))


def network(kind):
    def make():
        keras.utils.set_random_seed(7)
        regularizer = keras.regularizers.L2(0.01)
        layers = [
            keras.Input([FEATURES]),
            keras.layers.Dense(6, "tanh", kernel_regularizer=regularizer),
            kind(name="coupled"),
            keras.layers.Dense(OUTPUTS),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
        return model

    return make


def plan_for(make):
    layers = list(make()._flatten_layers())
    names = [layer.name for layer in layers]
    return StepPlan(whole_layers=(names.index("coupled"),))


CASES = {
    kind.__name__.lower(): kind for kind in (Experts, Renormalized, Centres, Graph)
}


@pytest.mark.parametrize("name", CASES)
def test_trains_what_stock_keras_trains(name, backend):
    """31 rows in batches of ten: the last has one row, so ranks are without rows."""
    make = network(CASES[name])
    arguments = make, rows(31), rows(17, 9)
    got = planned(*arguments, backend, plan_for(make))
    assert_same(got, stock(*arguments, backend), 1e-10)


def test_sums_are_added_over_replicas(backend):
    arguments = network(Sums), rows(31), rows(17, 9)
    got = planned(*arguments, backend, StepPlan(added_sums=(0,)))
    assert_same(got, stock(*arguments, backend), 1e-10)


def test_random_numbers_are_refused(backend):
    if backend.replicas == 1:
        pytest.skip("one replica has whole batches")
    make = network(Noise)
    with pytest.raises(UsageError, match=r"'coupled' .* draws random numbers"):
        planned(make, rows(31), None, backend, plan_for(make))


@pytest.mark.launches
@pytest.mark.parametrize(
    "name, ranks, chosen",
    [
        ("native", 2, "experts or random"),
        pytest.param("native", 3, "trains or sums", marks=pytest.mark.matrix),
        pytest.param("mpi", 2, "graph or renormalized", marks=pytest.mark.matrix),
    ],
)
def test_on_ranks(name, ranks, chosen, tmp_path):
    if name == "mpi":
        pytest.importorskip("mpi4py")
    ended = launch.launch(name, ranks, [HERE, "-k", chosen], tmp_path, seconds=400)
    assert ended.passed()
