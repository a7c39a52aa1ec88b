"""A variable that waits for its value reads as any other, and begins when a graph needs it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.training.keras_compat import held_parts
from collective.training.sharding.held import tracing
from collective.training.sharding.waiting import Owner, Waiting, waits

VALUE = np.arange(6.0, dtype="float32").reshape(2, 3)


@pytest.fixture
def variable():
    made = keras.Variable(VALUE, name="kernel")
    Waiting(made, (2, 3), lambda: tf.constant(VALUE), Owner("weight"))
    return made


def test_code_that_runs_eagerly_reads_and_assigns_it(variable):
    np.testing.assert_array_equal(variable * 2.0, VALUE * 2)
    variable.assign(VALUE + 1)
    np.testing.assert_array_equal(variable.numpy(), VALUE + 1)
    assert waits(variable)


def test_a_value_that_is_drawn_is_drawn_once():
    seeds = keras.random.SeedGenerator(1)
    made = keras.Variable(VALUE, name="kernel")
    Waiting(
        made, (2, 3), lambda: keras.random.normal((2, 3), seed=seeds), Owner("slot")
    )
    np.testing.assert_array_equal(made.numpy(), made.numpy())


def test_a_function_that_runs_begins_it(variable):
    add = tf.function(lambda: variable.assign_add(tf.ones((2, 3))), autograph=False)
    add()
    assert waits(variable) is None
    np.testing.assert_array_equal(variable.numpy(), VALUE + 1)
    add()
    np.testing.assert_array_equal(variable.numpy(), VALUE + 2)


def test_a_search_leaves_it_waiting(variable):
    with tracing(runs=False):
        tf.function(lambda: variable * 2.0, autograph=False).get_concrete_function()
    assert waits(variable)


def test_a_tape_begins_it(variable):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * variable)
    np.testing.assert_array_equal(tape.gradient(loss, variable.value), 2 * VALUE)
    assert waits(variable) is None


def test_an_optimizer_that_was_built_knows_it_later(variable):
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable])
    held_parts.make_whole(variable, tf.constant(VALUE))
    optimizer.apply([tf.ones((2, 3))], [variable])
    np.testing.assert_array_equal(variable.numpy(), VALUE - 1)
