"""``collective.distribute.Strategy`` on ranks: variables, metrics, and ``fit``.

Each rank has other data: R is the number of this rank, N the number of ranks.
"""

from __future__ import annotations

import copy
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.errors import UsageError
from tests import launch
from tests.training.distribute.replicas import equal

pytestmark = pytest.mark.skipif(not launch.launched(), reason="runs on ranks only")
ON_READ = tf.VariableSynchronization.ON_READ
AGGREGATIONS = [
    tf.VariableAggregation.SUM,
    tf.VariableAggregation.MEAN,
    tf.VariableAggregation.ONLY_FIRST_REPLICA,
]


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
    """Python may collect garbage at any time; ``fit`` averages the values of replicas."""
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
    """Keras' files and ``layer(x)`` read the mean, and not this rank's value."""
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
    # Export has changed it.
    equal(strategy.run(lambda: tf.identity(kept.value)), [mean])
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


# --- fit ------------------------------------------------------------------------------


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
