"""``collective.distribute.Strategy`` on ranks: what each method gives, and who reads what.

Each rank has other data: R is the number of this rank, N of how many there are.
"""

from __future__ import annotations

import copy
import gc
import os
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.distribute import Strategy
from collective.errors import UsageError
from tests import launch

pytestmark = pytest.mark.skipif(not launch.launched(), reason="runs on ranks only")
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
ON_READ = tf.VariableSynchronization.ON_READ
AGGREGATIONS = [
    tf.VariableAggregation.SUM,
    tf.VariableAggregation.MEAN,
    tf.VariableAggregation.ONLY_FIRST_REPLICA,
]


@pytest.fixture(scope="module")
def strategy(backends_by_name):
    return Strategy(backends_by_name(os.environ[launch.BACKEND]))


@pytest.fixture
def N(strategy):
    return strategy.num_replicas_in_sync


@pytest.fixture
def R(strategy):
    return strategy.cluster_resolver.task_id


def equal(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-6)


def context():
    return tf.distribute.get_replica_context()


def local(strategy, value):
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(value)]


def read(strategy, dataset):
    """The rows of this rank in each batch."""
    batches = strategy.experimental_distribute_dataset(dataset)
    return [local(strategy, batch)[0] for batch in batches]


# --- who is who -------------------------------------------------------------------------


def test_replicas(strategy, N, R):
    equal(strategy.run(lambda: context().replica_id_in_sync_group), R)
    assert strategy.cluster_resolver.cluster_spec().num_tasks("worker") == N
    assert strategy.cluster_resolver.task_type == "worker"
    assert strategy.extended.should_checkpoint == (R == 0)
    assert tf.distribute.get_replica_context().num_replicas_in_sync == 1
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy


# --- sums and gathers -------------------------------------------------------------------


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
    """As tf.train.ExponentialMovingAverage and an optimizer's ``use_ema`` keep them."""
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
    total = N * mean  # Keras sums the gradients of replicas
    equal(own.numpy(), 2 * total)
    optimizer.finalize_variable_values([own])
    equal(own.numpy(), 0.5 * total + 0.5 * 2 * total)  # it begins with the first


def test_a_loss_scale_that_overflows_on_one_rank(strategy, N, R):
    """All ranks leave the step out, and halve the scale."""
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
    """Sums of one graph without data between them; each rank computes in its own time."""
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


# --- rows -------------------------------------------------------------------------------


def shares(rows, N, R):
    each = -(-len(rows) // N)
    return rows[each * R : each * (R + 1)]


def test_rows_of_uneven_batches(strategy, N, R):
    found = read(strategy, tf.data.Dataset.range(33).batch(32))
    assert found == [shares([*range(32)], N, R), shares([32], N, R)]


def test_rows_are_skipped_before_they_are_mapped(strategy, N, R):
    seen = []

    def look(x):
        seen.append(int(x))
        return x

    # numpy_function is stateful: what it does is seen in whole batches only.
    plain = tf.data.Dataset.range(4 * N).map(lambda x: x + 1).batch(2 * N).prefetch(1)
    rows = [*range(1, 4 * N + 1)]
    assert read(strategy, plain) == [
        shares(rows[: 2 * N], N, R),
        shares(rows[2 * N :], N, R),
    ]
    spied = tf.data.Dataset.range(2 * N).map(
        lambda x: tf.py_function(look, [x], tf.int64)
    )
    spied = spied.map(lambda x: tf.ensure_shape(x, [])).batch(2 * N)
    assert read(strategy, spied) == [shares([*range(2 * N)], N, R)]
    assert sorted(seen) == [*range(2 * N)]


def test_a_shuffle_without_a_seed_is_shared(strategy, N, R):
    data = tf.data.Dataset.range(6 * N).shuffle(6 * N).batch(2 * N)
    for _ in range(2):
        mine = [row for batch in read(strategy, data) for row in batch]
        values = strategy.run(lambda: tf.constant(mine))  # noqa: B023
        everyone = strategy.gather(values, axis=0).numpy()
        assert sorted(everyone) == [*range(6 * N)]


def test_structures(strategy, N, R):
    x = np.arange(4.0 * N)
    data = tf.data.Dataset.from_tensor_slices({"a": x, "b": (x[:, None], -x)})
    for batch in strategy.experimental_distribute_dataset(data.batch(2 * N)):
        a, b = strategy.run(lambda d: (d["a"], d["b"][1]), args=(batch,))
        equal(a, -np.asarray(b))
        assert len(a) == 2


def test_sparse_rows(strategy, N, R):
    whole = tf.sparse.from_dense(np.eye(N))
    data = tf.data.Dataset.from_tensors(whole)
    (batch,) = strategy.experimental_distribute_dataset(data)
    dense = strategy.run(tf.sparse.to_dense, args=(batch,))
    equal(dense, np.eye(N)[R : R + 1])


def test_different_lengths_end_together(strategy, N, R):
    def make(context):
        assert context.num_input_pipelines == N
        return tf.data.Dataset.range(4 + 3 * context.input_pipeline_id).batch(2)

    rows = [
        len(local(strategy, batch)[0])
        for batch in strategy.distribute_datasets_from_function(make)
    ]
    assert len(rows) == -(-(4 + 3 * (N - 1)) // 2)
    assert sum(rows) == 4 + 3 * R


def with_policy(data, name):
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy[name]
    options.experimental_distribute.auto_shard_policy = policy
    return data.with_options(options)


def test_policies(strategy, N, R, tmp_path):
    data = tf.data.Dataset.range(2 * N).batch(N)
    assert read(strategy, with_policy(data, "OFF")) == [[i] for i in range(2 * N)]
    assert read(strategy, with_policy(data, "DATA")) == [[R], [N + R]]
    files = []
    for number in range(N):
        files.append(str(tmp_path / f"{number}.txt"))
        with open(files[-1], "w") as file:
            file.write(f"{number}\n{number}\n")
    lines = with_policy(tf.data.TextLineDataset(files).batch(N), "FILE")
    assert read(strategy, lines) == [[str(R).encode()]] * 2


def test_single_rows_are_refused(strategy):
    with pytest.raises(UsageError, match="batch"):
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(3))


def test_loops_over_data_in_functions(strategy):
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(10).batch(4))

    @tf.function
    def total(batches):
        found = tf.constant(0, tf.int64)
        for batch in batches:
            mine = strategy.run(tf.reduce_sum, args=(batch,))
            found += strategy.reduce(SUM, mine, axis=None)
        return found

    equal(total(data), 45)


# --- variables --------------------------------------------------------------------------


def test_the_first_value_is_rank_zeros(strategy, R):
    with strategy.scope():
        variables = [tf.Variable([R + 1.0]), tf.Variable(f"{R}"), tf.Variable(R > 0)]
    assert [v.numpy() for v in variables] == [[1.0], b"0", False]
    box = []

    @tf.function
    def make():
        def replica():
            if not box:
                box.append(tf.Variable(R + 5.0))
            return box[0].read_value()

        return strategy.run(replica)

    equal(make(), 5.0)


def test_a_model_that_one_rank_has_collected(strategy, R):
    """Python collects garbage when it likes; ``fit`` averages what replicas have written."""
    with strategy.scope():
        layer = keras.layers.BatchNormalization()
        layer.build([None, 3])
    rows = tf.constant(R + 1.0) * tf.ones([4, 3])
    strategy.run(tf.function(lambda: layer(rows, training=True)))
    if R == 0:
        del layer
        gc.collect()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((8, 3), "float32")
    assert model.fit(x, x[:, :1], verbose=0).history["loss"]


def test_written_together(strategy, N, R):
    with strategy.scope():
        variables = [tf.Variable(0.0, aggregation=a) for a in AGGREGATIONS]

    @tf.function
    def add():
        strategy.run(lambda: [v.assign_add(R + 1.0) for v in variables])

    add()
    equal([v.numpy() for v in variables], [N * (N + 1) / 2, (N + 1) / 2, 1.0])


def test_read_together(strategy, N, R):
    with strategy.scope():
        variables = [
            tf.Variable(0.0, synchronization=ON_READ, aggregation=a)
            for a in AGGREGATIONS
        ]

    @tf.function
    def add():
        strategy.run(lambda: [v.assign_add(R + 1.0) for v in variables])

    add()
    equal([v.numpy() for v in variables], [N * (N + 1) / 2, (N + 1) / 2, 1.0])
    variables[0].assign(6.0)
    equal(variables[0].numpy(), 6.0)
    equal(strategy.run(lambda: tf.identity(variables[0])), 6.0 / N)


def test_a_count_of_steps_needs_no_collective(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.SGD()

    @tf.function
    def step():
        strategy.run(lambda: optimizer.iterations.assign_add(1))

    step()
    step()
    assert int(optimizer.iterations.numpy()) == 2
    kinds = {op.type for op in step.get_concrete_function().graph.get_operations()}
    assert not {kind for kind in kinds if "Collective" in kind or "Func" in kind}


def test_moving_statistics_are_means_where_they_are_read(strategy, N, R, tmp_path):
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0)
        layer.build((None, 1))
    x = tf.fill([4, 1], R + 1.0)
    tf.function(lambda: strategy.run(lambda: layer(x, training=True)))()
    expected = [(N + 1) / 2]
    equal(layer.moving_mean.numpy(), expected)
    equal(layer.get_weights()[2], expected)
    for kept in (layer, layer.moving_mean, layer.moving_mean.value):
        layer.moving_mean.assign([0.0])
        tf.function(lambda: strategy.run(lambda: layer(x, training=True)))()
        state = tf.train.Checkpoint(kept=kept)
        path = state.write(str(tmp_path / f"state{R}"))
        layer.moving_mean.assign([0.0])
        state.read(path)
        equal(layer.moving_mean.numpy(), expected)
        equal(strategy.run(lambda: tf.identity(layer.moving_mean.value)), expected)


def test_moving_statistics_outside_of_the_scope(strategy, N, R, tmp_path):
    """What Keras' files and ``layer(x)`` read is the mean, not what this rank wrote."""
    with strategy.scope():
        made = keras.Sequential(
            [keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.0)]
        )
    x, mean = tf.constant([[R], [R + 2.0]]), (N + 1) / 2
    tf.function(lambda: strategy.run(lambda: made(x, training=True)))()
    kept = made.layers[0].moving_mean
    reads = [np.array, keras.ops.convert_to_numpy, tf.convert_to_tensor, lambda v: v[:]]
    reads += [lambda v: v + 0.0, lambda v: tf.gather(v.value, [0])]
    reads += [lambda v: tf.function(lambda: v.value + 0.0)(), lambda v: v.value.value()]
    reads.append(lambda v: copy.deepcopy(v.value))
    for read_value in reads:
        equal(read_value(kept), [mean])
    expected = (mean + 3 - mean) / np.sqrt(1 + made.layers[0].epsilon)
    one = tf.constant([[mean + 3]])
    equal(made(one, training=False), [[expected]])
    equal(tf.function(lambda: made(one, training=False))(), [[expected]])
    made.save_weights(tmp_path / "own.weights.h5")
    made.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    equal(loaded.serve(one), [[expected]])
    equal(
        strategy.run(lambda: tf.identity(kept.value)), [mean]
    )  # export has made it so
    kept.assign([0.0])
    made.load_weights(tmp_path / "own.weights.h5")
    equal(kept.numpy(), [mean])


def test_metrics(strategy, N, R, tmp_path):
    with strategy.scope():
        mean = keras.metrics.Mean()
    update = tf.function(lambda: strategy.run(lambda: mean.update_state(float(R))))
    update()
    equal(mean.result(), (N - 1) / 2)
    total = mean.variables[0].value
    for kept in (total, mean.variables[0]):
        state = tf.train.Checkpoint(total=kept)
        path = state.write(str(tmp_path / f"state{R}"))
        mean.reset_state()
        equal(mean.result(), 0.0)
        state.read(path)
        equal(total.numpy(), N * (N - 1) / 2)
        mean.reset_state()
        update()


# --- fit --------------------------------------------------------------------------------


def regression(rows):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)


def model():
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.2)
    made.compile(optimizer, "mse", metrics=["mae"])
    return made


def test_fit_and_predict_are_those_of_one_process(strategy, N):
    x, y = regression(3 * N + 1)
    batch = N + 1  # uneven from the first
    given = {"batch_size": batch, "shuffle": False, "verbose": 0, "epochs": 2}
    alone = model()
    with strategy.scope():
        together = model()
    expected = alone.fit(x, y, **given)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
    data = strategy.experimental_distribute_dataset(data)
    history = together.fit(data, epochs=2, verbose=0, validation_data=(x, y))
    for mine, theirs in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    np.testing.assert_allclose(
        history.history["loss"], expected.history["loss"], rtol=1e-5
    )
    outputs = together.predict(x, batch_size=batch, verbose=0)
    np.testing.assert_allclose(outputs, alone.predict(x, verbose=0), rtol=1e-4)


def test_fit_refuses_the_batches_of_one_rank(strategy):
    with strategy.scope():
        made = model()
    data = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensor_slices(regression(8)).batch(2)
    )
    with pytest.raises(UsageError, match="distribute_datasets_from_function"):
        made.fit(data, verbose=0)
