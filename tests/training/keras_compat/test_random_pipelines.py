"""Parallel calls of ``map`` draw in the order of the elements, which stay in order."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.training.keras_compat import random_pipelines

ROWS = 600


def uniform(x):
    return x + tf.random.uniform((), seed=3)


def with_generator():
    generator = keras.random.SeedGenerator(5)
    return lambda x: x + keras.random.uniform((), seed=generator)


def in_branch(x):
    return tf.cond(x < 1e9, lambda: uniform(x), lambda: x)


def read(function, **parallel) -> np.ndarray:
    """Return what a pipeline gives in a first pass, with more threads than processors."""
    tf.random.set_seed(1)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 16
    dataset = tf.data.Dataset.range(ROWS).map(lambda x: tf.cast(x, tf.float32))
    dataset = dataset.map(function, **parallel).batch(7).prefetch(2)
    return np.concatenate([*dataset.with_options(options).as_numpy_iterator()])


@pytest.mark.parametrize("make", [lambda: uniform, with_generator, lambda: in_branch])
@pytest.mark.parametrize("calls", [tf.data.AUTOTUNE, 8])
def test_draws_are_those_of_calls_one_after_the_other(make, calls):
    stock = tf.data.Dataset.__iter__
    wanted = read(make())
    with random_pipelines.drawing_in_order():
        for _ in range(2):
            found = read(make(), num_parallel_calls=calls)
            np.testing.assert_array_equal(found, wanted)
        assert not random_pipelines.determinism.is_enabled()
    assert tf.data.Dataset.__iter__ is stock


def test_pipelines_that_draw_nothing_are_left_as_they_are():
    """They would lose what they read ahead."""

    def stateless(x):
        return tf.random.stateless_uniform((), [x, 1])

    def python(x):
        return tf.numpy_function(lambda one: one, [x], tf.int64)

    numbers = tf.data.Dataset.range(3)
    for function in (stateless, python):
        mapped = numbers.map(function, num_parallel_calls=2).prefetch(1)
        assert not random_pipelines._draws_by_chance(mapped)
    one_by_one = numbers.map(lambda x: tf.random.uniform((), seed=1)).shuffle(3)
    assert not random_pipelines._draws_by_chance(one_by_one)
    beside = tf.data.Dataset.zip((numbers, numbers.map(uniform_of, 2)))
    assert random_pipelines._draws_by_chance(beside.batch(2))


def uniform_of(x):
    return uniform(tf.cast(x, tf.float32))


def test_draws_without_a_seed_are_read_as_by_tensorflow():
    tf.keras.backend.clear_session()
    tf.random.set_seed(None)
    raw = tf.raw_ops.RandomUniform
    mapped = tf.data.Dataset.range(9).map(
        lambda x: raw(shape=[1], dtype=tf.float32), num_parallel_calls=2
    )
    with random_pipelines.drawing_in_order():
        assert len([*mapped]) == 9


def slow(x):
    """Return x, late for half of the elements."""
    wait = tf.numpy_function(
        lambda one: time.sleep(0.02 * (one % 2)) or one, [x], tf.int64
    )
    return tf.ensure_shape(wait, [])


def any_order(dataset):
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


KINDS = {
    "map": lambda x: x.map(slow, 8, deterministic=False),
    "batch": lambda x: x.batch(2, num_parallel_calls=8, deterministic=False).unbatch(),
    "interleave": lambda x: x.interleave(
        lambda one: tf.data.Dataset.from_tensors(one).map(slow),
        *(8, 1, 8),
        deterministic=False,
    ),
    "options": lambda x: any_order(x.map(slow, num_parallel_calls=8)).prefetch(2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_elements_keep_their_order_though_any_is_allowed(kind):
    stock = tf.data.Dataset.map
    options = tf.data.Options()
    options.threading.private_threadpool_size = 16
    with random_pipelines.keeping_order():
        dataset = KINDS[kind](tf.data.Dataset.range(16)).with_options(options)
    assert tf.data.Dataset.map is stock
    assert [*dataset.as_numpy_iterator()] == [*range(16)]
