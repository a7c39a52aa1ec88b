"""``collective.distribute.Strategy`` on ranks: the rows that each reads.

Each rank has other data: R is the number of this rank, N the number of ranks.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from collective.errors import UsageError
from tests import launch
from tests.training.distribute.replicas import equal, local, read

pytestmark = pytest.mark.skipif(not launch.launched(), reason="runs on ranks only")
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


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

    # numpy_function is stateful, so its result shows only in whole batches.
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
