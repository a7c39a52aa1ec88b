"""Sums that a GPU makes in any order are made on the host; here a GPU is pretended."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from collective.training.partition import atomics
from collective.training.partition.exchange import BackendExchange

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.trains]
ROWS, COLUMNS, WORDS = 14, 3, 5  # each word is looked up several times


@pytest.fixture
def pretended(monkeypatch):
    """A GPU, and a second rank; returns what is made on the host."""
    real = tf.config.list_logical_devices
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind=None: ["a GPU"] if kind == "GPU" else real(kind),
    )
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
    # What has a sum for each rank's rows, and is then summed over ranks, is no matter.
    assert pretended or name in ("adam", "ftrl")
    for op in pretended:
        graph = op.graph.get_operations()
        assert not op.type.startswith("ResourceScatter")
        sums = [o for o in graph if o.type == "UnsortedSegmentSum"]
        assert any(o.device.endswith("CPU:0") for o in (*sums, op))


def test_counts_stay_where_they_are(pretended):
    """Whole numbers have no order."""
    with tf.Graph().as_default():
        counts = tf.math.unsorted_segment_sum(tf.ones([3], tf.int32), [0, 0, 1], 2)
        node = type(
            "Node", (), {"type": counts.op.type, "inputs": list(counts.op.inputs)}
        )
    exchange = type("Exchange", (), {"place": (0, 2), "devices": ()})
    assert not atomics.parts_ranks(node, exchange)
    node.inputs = [tf.zeros([3])]
    assert atomics.parts_ranks(node, exchange)
