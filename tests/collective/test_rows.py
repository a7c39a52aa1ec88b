"""Repeated rows are added up on the host where there is a GPU; here one is pretended."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from collective.training.variants.coupled.look_ups import gather_look_ups

from collective.tensorflow_ops import rows
from collective.tensorflow_ops.xla import compiled_around_collectives
from collective.training.keras_compat.optimizers import rows_in_order

OPTIMIZERS = ["adam", "sgd", "rmsprop", "adagrad", "ftrl", "scaled"]


@pytest.fixture
def pretended(monkeypatch):
    real = tf.config.list_logical_devices
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind=None: ["a GPU"] if kind == "GPU" else real(kind),
    )


def make_optimizer(name):
    if name == "scaled":
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop())
    return keras.optimizers.get(name)


def updated(name):
    """A table after three updates by rows that repeat, and the graph of one."""
    keras.utils.set_random_seed(1)
    table, optimizer = keras.Variable(np.ones((5, 3))), make_optimizer(name)
    optimizer.build([table])

    @tf.function
    def update(values, indices):
        slices = tf.IndexedSlices(values, indices, tf.constant([5, 3], tf.int64))
        with rows_in_order(optimizer, [slices]):
            optimizer.apply([slices], [table])

    values = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
    given = tf.constant(values), tf.constant([0, 1, 1, 3, 3, 3, 4])
    for _ in range(3):
        update(*given)
    return table.numpy(), update.get_concrete_function(*given).graph


def operations(graph):
    yield from graph.get_operations()
    for function in graph._functions.values():
        yield from function.graph.get_operations()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_adds_rows_on_the_host(name, pretended, monkeypatch):
    found, graph = updated(name)
    sums = [o for o in operations(graph) if o.type == "UnsortedSegmentSum"]
    assert sums and {o.device for o in sums} == {"/device:CPU:0"}
    assert not any(
        "Scatter" in o.type for o in operations(graph) if "Resource" in o.type
    )
    monkeypatch.undo()
    np.testing.assert_allclose(found, updated(name)[0], rtol=1e-6)


def test_all_else_stays_where_it_is(pretended):
    _, graph = updated("adam")
    others = [o for o in operations(graph) if o.type != "UnsortedSegmentSum"]
    assert {o.device for o in others if o.type.startswith("Assign")} == {""}


def test_eagerly_and_where_nothing_repeats(pretended):
    slices = tf.IndexedSlices(tf.ones([2, 1]), tf.constant([1, 1]), tf.constant([3, 1]))
    assert rows.dense(slices).numpy().tolist() == [[0], [2], [0]]
    assert not rows.parts_ranks([tf.ones([2])])


def compiled(operations, kind):
    """Whether XLA may compile the operations of a kind, of which there are some."""
    return {o.get_attr("_XlaCompile") for o in operations if o.type == kind}


def test_xla_leaves_what_only_values_of_a_step_decide(pretended):
    @tf.function
    @compiled_around_collectives
    def gathered(values, indices):
        slices = tf.IndexedSlices(values, indices, tf.constant([5, 3], tf.int64))
        replica = tf.constant(0, tf.int64)
        (whole,) = gather_look_ups([slices], replica, 2, lambda ts: [2 * t for t in ts])
        return rows.dense(whole) + tf.tanh(values[0])

    graph = gathered.get_concrete_function(
        tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int32)
    ).graph
    found = list(operations(graph))
    assert compiled(found, "Pad") == compiled(found, "UnsortedSegmentSum") == {False}
    assert compiled(found, "Tanh") == {True}
