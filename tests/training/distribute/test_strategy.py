"""``collective.distribute.Strategy`` on ranks: identities, sums, and gathers.

Each rank has other data: R is the number of this rank, N the number of ranks.
"""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import launch
from tests.training.distribute.replicas import context, equal, local

pytestmark = pytest.mark.skipif(not launch.launched(), reason="runs on ranks only")
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


# --- identities -----------------------------------------------------------------------


def test_replicas(strategy, N, R):
    equal(strategy.run(lambda: context().replica_id_in_sync_group), R)
    assert strategy.cluster_resolver.cluster_spec().num_tasks("worker") == N
    assert strategy.cluster_resolver.task_type == "worker"
    assert strategy.extended.should_checkpoint == (R == 0)
    assert tf.distribute.get_replica_context().num_replicas_in_sync == 1
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy


# --- sums and gathers -----------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
def test_reduce(strategy, N, R, traced):
    def reduce():
        mine = strategy.run(lambda: {"a": tf.constant(R + 1.0), "b": tf.ones([2]) * R})
        return strategy.reduce(SUM, mine, axis=None), strategy.reduce(
            "MEAN", mine["a"], axis=None
        )

    total, mean = (tf.function(reduce) if traced else reduce)()
    equal(total["a"], N * (N + 1) / 2)
    equal(total["b"], [N * (N - 1) / 2] * 2)
    equal(mean, (N + 1) / 2)


def test_reduce_along_uneven_rows(strategy, N, R):
    mine = strategy.run(lambda: tf.range(R + 1.0))
    rows = np.concatenate([np.arange(r + 1.0) for r in range(N)])
    equal(strategy.reduce(MEAN, mine, axis=0), rows.mean())
    equal(strategy.reduce(SUM, mine, axis=0), rows.sum())


def test_mean_of_whole_numbers_is_not_cut(strategy, N, R):
    mine = strategy.run(lambda: tf.constant(R))
    equal(strategy.reduce(MEAN, mine, axis=None), (N - 1) / 2)


def test_all_reduce_and_its_gradient(strategy, N, R):
    @tf.function
    def run():
        def replica():
            x = tf.constant(R + 1.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = context().all_reduce(SUM, x * x)
            return y, tape.gradient(y, x)

        return strategy.run(replica)

    y, gradient = run()
    equal(y, sum((r + 1.0) ** 2 for r in range(N)))
    equal(gradient, N * 2.0 * (R + 1))


def test_slices_are_joined(strategy, N, R):
    def replica():
        mine = tf.IndexedSlices(tf.ones([R + 1, 2]), tf.range(R + 1), [N, 2])
        return tf.convert_to_tensor(context().all_reduce(SUM, mine))

    found = tf.function(lambda: strategy.run(replica))()
    equal(found, [[N - row] * 2 for row in range(N)])


@pytest.mark.parametrize("axis", [0, 1])
def test_gather_uneven(strategy, N, R, axis):
    shape = [2, R + 1] if axis else [R + 1, 2]
    expected = np.concatenate(
        [np.full([2, r + 1] if axis else [r + 1, 2], r) for r in range(N)], axis
    )
    mine = strategy.run(lambda: tf.fill(shape, R))
    equal(strategy.gather(mine, axis=axis), expected)
    replica = lambda: context().all_gather(tf.fill(shape, R), axis=axis)  # noqa: E731
    equal(tf.function(lambda: strategy.run(replica))(), expected)


def test_gather_text_and_bool(strategy, N, R):
    words = strategy.run(lambda: tf.constant([["é" * R, "b"]] * (R + 1)))
    found = strategy.gather(words, axis=0).numpy()
    expected = [["é" * r, "b"] for r in range(N) for _ in range(r + 1)]
    assert [[word.decode() for word in row] for row in found] == expected
    flags = strategy.run(lambda: tf.constant([R == 0]))
    equal(strategy.gather(flags, axis=0), [r == 0 for r in range(N)])


def test_values_from_function(strategy, N, R):
    make = lambda context: tf.constant(context.replica_id_in_sync_group)  # noqa: E731
    values = strategy.experimental_distribute_values_from_function(make)
    assert local(strategy, values) == [R]
    equal(strategy.reduce(SUM, values, axis=None), N * (N - 1) / 2)


def test_collectives_in_branches_and_loops(strategy, N):
    def replica(steps):
        x = tf.constant(0.0)
        for _ in tf.range(steps):
            if x < 100.0:
                x += context().all_reduce(SUM, tf.constant(1.0))
        return x

    run = tf.function(lambda steps: strategy.run(replica, args=(steps,)))
    equal(run(tf.constant(3)), 3.0 * N)


def test_merge_call(strategy, N, R):
    def merge(strategy, x):
        return strategy.reduce(SUM, x, axis=None)

    replica = lambda: context().merge_call(merge, args=(tf.constant(R + 1.0),))  # noqa: E731
    equal(strategy.run(replica), N * (N + 1) / 2)


def test_merge_call_in_branches_and_loops(strategy, N):
    def merge(strategy, x):
        return strategy.reduce(SUM, x, axis=None)

    def replica(steps):
        total = tf.constant(0.0)
        for step in tf.range(steps):
            if step % 2 == 0:
                total += context().merge_call(merge, args=(tf.constant(1.0),))
        return total

    run = tf.function(lambda steps: strategy.run(replica, args=(steps,)))
    equal(run(tf.constant(3)), 2.0 * N)


def test_moving_averages_of_weights(strategy, N, R):
    """tf.train.ExponentialMovingAverage and an optimizer's ``use_ema`` keep them so."""
    with strategy.scope():
        weight = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
        average = tf.Variable(
            0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN
        )
        own = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
        optimizer.build([own])

    @tf.function
    def step():
        def replica():
            weight.assign_add(R + 1.0)
            average.assign(0.5 * average + 0.5 * weight)
            optimizer.apply([tf.constant(-(R + 1.0))])

        strategy.run(replica)

    step()
    step()
    mean = (N + 1) / 2
    equal(average.numpy(), 0.5 * 0.5 * mean + 0.5 * 2 * mean)
    total = N * mean  # because Keras sums the gradients of replicas
    equal(own.numpy(), 2 * total)
    optimizer.finalize_variable_values([own])
    # The average begins with the first.
    equal(own.numpy(), 0.5 * total + 0.5 * 2 * total)


def test_a_loss_scale_that_overflows_on_one_rank(strategy, N, R):
    """All ranks omit the step, and halve the scale."""
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=8.0
        )
        optimizer.build([weight])
    gradients = tf.constant([np.inf if R == N - 1 else 1.0, 8.0])

    @tf.function
    def step(number):
        strategy.run(lambda: optimizer.apply([gradients[number]], [weight]))

    step(0)
    equal(weight.numpy(), 1.0)
    equal(optimizer.dynamic_scale.numpy(), 4.0)
    step(1)
    equal(weight.numpy(), 1.0 - 2.0 * N)


def test_order_under_random_delays(strategy, N, R):
    """The sums of one graph do not depend on each other; ranks are slow at random."""
    draw = np.random.default_rng(R)

    def late(x):
        time.sleep(draw.uniform(0, 0.01))
        return x

    @tf.function
    def run():
        def replica():
            found = []
            for number in range(5):
                x = tf.fill([number + 1], R + float(number))
                x = tf.ensure_shape(tf.numpy_function(late, [x], tf.float32), x.shape)
                found.append(context().all_reduce(SUM, x))
            return found

        return strategy.run(replica)

    for _ in range(5):
        for number, found in enumerate(run()):
            equal(found, [N * (N - 1) / 2 + N * number] * (number + 1))


def test_function_traced_outside_of_the_scope(strategy, N):
    @tf.function
    def count():
        return tf.distribute.get_strategy().num_replicas_in_sync * tf.constant(1)

    equal(count(), 1)
    equal(strategy.run(count), N)
    equal(count(), 1)


def test_an_error_on_all_ranks_can_be_caught(strategy, N):
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    equal(strategy.reduce(SUM, strategy.run(lambda: tf.constant(1.0)), axis=None), N)


def test_xla_is_refused_by_name(strategy):
    replica = lambda: context().all_reduce(SUM, tf.constant(1.0))  # noqa: E731
    with pytest.raises(Exception, match="XLA cannot compile"):  # AutoGraph's class
        tf.function(lambda: strategy.run(replica), jit_compile=True)()
