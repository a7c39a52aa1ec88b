"""Losses and look-ups of the whole batch in micro-batches: as stock Keras in one batch."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
from keras import ops

from collective.errors import UsageError
from collective.training.step.plan import StepPlan
from tests import launch
from tests.training.coupled import test_gathered
from tests.training.coupled.compared import NAMES, assert_same, planned, stock

HERE = "tests/training/coupled/test_micro_batches.py"
MATRIX = pytest.mark.matrix

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.on_ranks]


@pytest.fixture(params=NAMES)
def backend(request, backends_by_name):
    keras.config.set_floatx("float64")
    return backends_by_name(request.param)


class WeighsItself(keras.losses.Loss):
    """Couples rows, and has a weight of its own, which a layer made."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, y, predicted):
        whole = test_gathered.correlated(y, predicted)
        return whole * ops.exp(ops.mean(self.layer.kernel)) + whole**2


class Counts(keras.layers.Layer):
    """Adds to the loss, counts in a metric, and keeps a moving mean."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(), trainable=False, name="mean")
        self.counted = keras.metrics.Mean(name="counted")

    def call(self, x, training=False):
        self.add_loss(0.01 * ops.mean(ops.square(x)))
        self.counted.update_state(x)
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x))
        return x


def noisy(rate=0.4):
    """With dropout, a loss of a layer, state, a metric of a layer, and own weights."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input([test_gathered.FEATURES])
    hidden = keras.layers.Dense(6, "tanh", kernel_regularizer="l2")(inputs)
    hidden = Counts()(keras.layers.Dropout(rate)(hidden))
    last = keras.layers.Dense(2, "sigmoid")
    model = keras.Model(inputs, last(hidden))
    model.compile(keras.optimizers.Adam(0.02), WeighsItself(last), metrics=["mae"])
    return model


def embedded(optimizer=keras.optimizers.Adam):
    """The optimizer sees each look-up, and the loss couples the rows."""
    keras.utils.set_random_seed(4)
    given = keras.Input((4,), dtype="int32")
    table = keras.layers.Embedding(7, 3, mask_zero=True)(given)
    outputs = keras.layers.Dense(2, "sigmoid")(keras.layers.LSTM(4)(table))
    model = keras.Model(given, outputs)
    loss = test_gathered.correlated
    model.compile(optimizer(0.05), loss, metrics=[test_gathered.Largest()])
    return model


def tokens(count, seed=5):
    x, _ = test_gathered.tokens(count, seed)
    return x, test_gathered.rows(count, seed)[1]


LOOK_UPS = StepPlan(gather_look_ups=True)
CASES = {
    **{name: case for name, case in test_gathered.CASES.items() if name != "own-loss"},
    "noisy": (lambda: noisy, test_gathered.rows, test_gathered.LOSS),
    "look-ups": (lambda: embedded, tokens, StepPlan(True, True, gather_look_ups=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_what_stock_keras_trains(name, backend):
    """31 rows in batches of ten, each in three parts: the last has one row."""
    assert_trains_as_stock(CASES, name, backend, accumulate=3)


def assert_trains_as_stock(cases, name, backend, **options):
    make, data, plan = cases[name]
    counts = (30, 20) if name == "two-outputs" else (31, 17)
    arguments = make(), data(counts[0]), data(counts[1], 9)
    got = planned(*arguments, backend, plan, **options)
    assert_same(got, stock(*arguments, backend), 1e-10)


# Of virtual replicas, masks are other ones.
PIECES = {name: case for name, case in CASES.items() if name != "noisy"}
PIECES["counting"] = lambda: lambda: noisy(0.0), test_gathered.rows, test_gathered.LOSS


@pytest.mark.parametrize("name", PIECES)
def test_pieces_train_what_stock_keras_trains(name, backend):
    """A rank has one, or several; in the last batch some have no row."""
    assert_trains_as_stock(PIECES, name, backend, virtual_replicas=4)


@pytest.mark.parametrize("rows_have_some_more", [False, True])
def test_look_ups_of_a_loss_that_is_a_sum(rows_have_some_more, backend):
    def make():
        keras.utils.set_random_seed(4)
        given = keras.Input((6,), dtype="int32")
        table = (
            test_gathered.Bag(distinct=False)
            if rows_have_some_more
            else keras.Sequential(
                [keras.layers.Embedding(7, 3), keras.layers.Dropout(0.3)]
            )
        )
        hidden = keras.layers.Flatten()(table(given))
        model = keras.Model(given, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.Adam(0.05, clipnorm=1.0), "mse")
        return model

    rng = np.random.default_rng(5)
    data = rng.integers(1, 7, (31, 6)).astype("int32"), rng.normal(size=(31, 1))
    data[0][::3, 2:] = 0
    every = planned(make, data, None, backend, LOOK_UPS, accumulate=4)
    assert_same(every, stock(make, data, None, backend), 1e-10)
    by_rows = dataclasses.replace(LOOK_UPS, gather_look_ups=False, as_rows=(0,))
    added = planned(make, data, None, backend, by_rows, accumulate=4)
    assert_same(added, planned(make, data, None, backend, StepPlan()), 1e-10)


def test_what_it_cannot_know_is_refused(backend):
    data = test_gathered.rows(20)
    plan = test_gathered.LOSS
    with pytest.raises(UsageError, match="a compute_loss of its own and losses of"):
        planned(test_gathered.own_loss, data, None, backend, plan, accumulate=2)
    layer = StepPlan(whole_layers=(1,))
    with pytest.raises(UsageError, match="a layer that couples the rows"):
        planned(noisy, data, None, backend, layer, accumulate=2)


@pytest.mark.launches
@pytest.mark.parametrize(
    "name, ranks, chosen",
    [
        ("native", 2, "noisy or look-ups"),
        pytest.param("native", 3, "noisy or look-ups or counting", marks=MATRIX),
        pytest.param("native", 2, "train or look_ups or options", marks=MATRIX),
        pytest.param("mpi", 3, "noisy or weights or look", marks=MATRIX),
        pytest.param("horovod", 2, "noisy or weights or look", marks=MATRIX),
        pytest.param("tf-multiworker", 2, "noisy or weights or masked", marks=MATRIX),
    ],
)
def test_on_ranks(name, ranks, chosen, tmp_path):
    pytest.importorskip("mpi4py")
    if name == "horovod":
        pytest.importorskip("horovod")
    ended = launch.launch(name, ranks, [HERE, "-k", chosen], tmp_path, seconds=300)
    assert ended.passed()
