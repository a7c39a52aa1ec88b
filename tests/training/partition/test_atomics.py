"""Sums that a GPU makes in any order run on the host; here a GPU is pretended."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from collective.backends import Options
from collective.backends.single import SingleBackend
from collective.environment import Environment
from collective.training.partition import atomics
from collective.training.partition.backend_exchange import BackendExchange
from collective.training.partition.timed_exchange import TimedExchange

pytestmark = pytest.mark.usefixtures("clean_keras")
ROWS, COLUMNS, WORDS = 14, 3, 5  # each word is looked up several times


@pytest.fixture
def pretended(monkeypatch, pretended_gpu):
    """Pretend a GPU and a second rank; return the operations that run on the host."""
    monkeypatch.setattr(BackendExchange, "place", (0, 2))
    made = []
    on_host = atomics.on_host

    def noting(node, inputs):
        made.append(on_host(node, inputs))
        return made[-1]

    monkeypatch.setattr(atomics, "on_host", noting)
    return made


def make(name):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(WORDS, 4), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((COLUMNS,)), *layers, keras.layers.Dense(1)])
    optimizer = keras.optimizers.get(name)
    if name == "rmsprop":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize("name", ["adam", "sgd", "rmsprop", "adagrad", "ftrl"])
def test_updates_add_look_ups_on_the_host(name, pretended):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, WORDS, (ROWS, COLUMNS)), rng.normal(size=(ROWS, 1))
    words = {"batch_size": ROWS, "epochs": 3, "shuffle": False, "verbose": 0}
    stock, ours = make(name), make(name)
    stock.fit(x, y, **words)
    collective.fit(ours, x, y, backend="single", **words)
    for got, wanted in zip(ours.weights, stock.weights, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-6)
    # A sum over each rank's rows, then over ranks, is not affected.
    assert pretended or name in ("adam", "ftrl")
    for op in pretended:
        if op.type.startswith("ResourceScatter"):
            assert op.inputs[1].op.type == "Unique"  # each row occurs once
            op = op.inputs[2].op
        assert op.type == "UnsortedSegmentSum" and op.device.endswith("CPU:0")


def test_threads_of_a_processor_add_each_row_once(monkeypatch):
    """Threads, too, add repeated rows in any order."""
    monkeypatch.setattr(BackendExchange, "place", (0, 2))
    made, on_host = [], atomics.on_host
    monkeypatch.setattr(
        atomics, "on_host", lambda *of: made.append(on_host(*of)) or made[-1]
    )
    x = np.random.default_rng(0).integers(0, WORDS, (ROWS, COLUMNS))
    words = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    collective.fit(make("sgd"), x, np.zeros((ROWS, 1)), backend="single", **words)
    assert [op.inputs[1].op.type for op in made] == ["Unique"]


def test_counts_stay_where_they_are(pretended):
    """The order does not matter for whole numbers."""
    with tf.Graph().as_default():
        counts = tf.math.unsorted_segment_sum(tf.ones([3], tf.int32), [0, 0, 1], 2)
        node = type(
            "Node", (), {"type": counts.op.type, "inputs": list(counts.op.inputs)}
        )
    exchange = type("Exchange", (), {"place": (0, 2), "devices": (), "tree": None})
    assert not atomics.parts_ranks(node, exchange)
    node.inputs = [tf.zeros([3])]
    assert atomics.parts_ranks(node, exchange)


class OfKernels(keras.layers.Layer):
    """A loss of a convolution without rows, which each rank would compute."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(2, 2, 1, 2))

    def call(self, x):
        image = tf.reshape(tf.range(9.0), [1, 3, 3, 1])
        self.add_loss(tf.reduce_mean(tf.nn.conv2d(image, self.kernel, 1, "SAME") ** 2))
        return x


def test_all_take_the_gradient_of_a_convolution_that_rank_0_made(
    pretended, monkeypatch
):
    broadcast, sent = BackendExchange.broadcast, []

    def noting(self, tensor):
        sent.append(tensor.op.type)
        return broadcast(self, tensor)

    monkeypatch.setattr(BackendExchange, "broadcast", noting)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, COLUMNS)), rng.normal(size=(ROWS, 1))
    words = {"batch_size": ROWS, "epochs": 3, "shuffle": False, "verbose": 0}
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        models.append(keras.Sequential([OfKernels(), keras.layers.Dense(1)]))
        models[-1].build((None, COLUMNS))
        models[-1].compile("sgd", "mse")
    stock, ours = models
    stock.fit(x, y, **words)
    collective.fit(ours, x, y, backend="single", **words)
    assert sent == ["Conv2D", "Conv2DBackpropFilter"]
    for got, wanted in zip(ours.weights, stock.weights, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-5)


def test_a_broadcast_is_not_taken_for_the_first_sum():
    """A step searches the first sum for gradients that are not finite."""
    backend = SingleBackend(Options(), Environment())

    @tf.function
    def run():
        exchange = TimedExchange(backend, tf.constant(1, tf.int64))
        found = exchange.broadcast(tf.constant([0.5, -1.5]))
        assert exchange._number is not None
        return found

    np.testing.assert_array_equal(run(), [0.5, -1.5])
