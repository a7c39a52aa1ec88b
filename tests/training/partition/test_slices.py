"""Rules of slices, look-ups and scatters, each compared with one process."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.training.partition.operands import BLOCKS, Operands, below, check, generator


@pytest.mark.parametrize("seed", range(3))
def test_slices(seed: int) -> None:
    blocks = BLOCKS[2 + seed]
    functions = {
        "others": lambda x: x[:, 1:3],
        "number": lambda x: x[:, 2],
        "from behind": lambda x: x[..., -1],
        "steps": lambda x: x[:, ::2, ::-1],
        "new": lambda x: x[:, None, ..., tf.newaxis],
        "all": lambda x: x[: tf.shape(x)[0]],
        "from 0": lambda x: x[0:, :, 1:2],
        "Slice": lambda x: tf.slice(x, [0, 1, 0], [-1, 2, 1]),
        "first half": lambda x: x[: tf.shape(x)[0] // 2] if sum(blocks) == 2 else x,
        "second half": lambda x: x[tf.shape(x)[0] // 2 :] if blocks == (1, 1) else x,
        "gradient": lambda x: tf.pad(x[:, 1:], [[0, 0], [1, 0], [0, 0]]),
    }
    operands = Operands(generator(seed), blocks).sharded([4, 3])
    made = check(operands, functions, derivatives=2)
    assert not made.fallbacks or blocks == (2,)
    across = {
        "first": lambda x: x[0],
        "last": lambda x: x[-1],
        "some": lambda x: x[:1],
        "rest": lambda x: x[1:],
        "but the last": lambda x: x[:-1],
        "every second": lambda x: x[::2],
        "backwards": lambda x: x[::-1],
        "Slice": lambda x: tf.slice(x, [0, 0, 0], [1, 2, 3]),
        "differences": lambda x: x[1:] - x[:-1],
        "of other axes": lambda x: tf.transpose(x, [1, 0, 2])[1, :1],
        "number": lambda x: x[tf.shape(x)[0] - 1, 1],
    }
    check(operands, across, derivatives=1)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32"])
@pytest.mark.parametrize("axis", [0, 1])
def test_of_the_first_or_last_row_no_others_are_sent(dtype: str, axis: int) -> None:
    at = (slice(None),) * axis
    functions = {
        "first": lambda x: tf.cast(x, dtype)[(*at, 0)],
        "last": lambda x: tf.cast(x, dtype)[(*at, -1)],
        "part": lambda x: tf.cast(x, dtype)[(*at, 0, None, ..., 1)],
        "backwards": lambda x: tf.cast(x, dtype)[(*at, -1, slice(None, None, -1))],
    }
    for blocks in [(1,), (2,)]:
        operands = Operands(generator(axis), blocks).sharded([4, 3], axis)
        made = check(operands, functions, tolerance=1e-6)
        assert not made.fallbacks and not made.traffic.gathers


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_of_a_permutation_each_replica_takes_its_rows(dtype: str) -> None:
    def shuffled(x: tf.Tensor) -> tf.Tensor:
        draws = tf.random.stateless_uniform([tf.shape(x)[0]], [1, 2])
        return tf.gather(tf.cast(x, dtype), tf.argsort(draws))

    functions = {
        "shuffle": shuffled,
        "mixed": lambda x: tf.cast(x, dtype) * 0.3 + 0.7 * shuffled(x),
        "pasted": lambda x: tf.where(x > 0, tf.cast(x, dtype), shuffled(x)),
        "in one": lambda x: x * tf.random.experimental.stateless_shuffle(x, [1, 2]),
    }
    operands = Operands(generator(3)).sharded([4, 3])
    made = check(operands, functions, derivatives=1, tolerance=1e-6)
    assert made.fallbacks == ["StatelessShuffle", "TopKV2"]  # these need all rows


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "int64"])
def test_a_confusion_matrix_is_a_sum(dtype: str) -> None:
    functions = {
        "counts": lambda a, b, w: tf.math.confusion_matrix(a, b, 4, dtype=dtype),
        "weights": lambda a, b, w: tf.math.confusion_matrix(
            a, b, 4, tf.cast(w * 9, dtype), dtype=dtype
        ),
    }
    operands = Operands(generator(2)).sharded([], 0, below(4)).sharded([], 0, below(4))
    made = check(operands.sharded([]), functions, tolerance=1e-5)
    gathered = {value.shape for value in made.traffic.gathers}
    assert not made.fallbacks and not gathered


@pytest.mark.parametrize("seed", range(3))
def test_look_ups(seed: int) -> None:
    rng, blocks = generator(seed), BLOCKS[2 + seed]
    functions = {
        "rows of a table": lambda x, i, w: tf.gather(w, i),
        "columns of a table": lambda x, i, w: tf.gather(w, i, axis=1),
        "columns of rows": lambda x, i, w: tf.gather(x, [3, 0, 1], axis=1),
        "of each row": lambda x, i, w: tf.gather(x, i[:, None], batch_dims=1),
        "of each row, last": lambda x, i, w: tf.gather(x, i, axis=1, batch_dims=1),
        "GatherNd": lambda x, i, w: tf.gather_nd(w, tf.stack([i, i], -1)),
        "GatherNd of rows": lambda x, i, w: tf.gather_nd(x, i[:, None], batch_dims=1),
        "OneHot": lambda x, i, w: tf.one_hot(i, 5, dtype=x.dtype) * 2,
        "OneHot first": lambda x, i, w: tf.one_hot(i, 5, axis=0),
        "Bucketize": lambda x, i, w: tf.raw_ops.Bucketize(
            input=x, boundaries=[-1.0, 0, 1]
        ),
        "searchsorted": lambda x, i, w: tf.searchsorted(tf.sort(x), x),
        "in a table": lambda x, i, w: tf.searchsorted(
            [-1.0, 0.0, 1.0], tf.cast(x[:, 0], tf.float32)
        ),
    }
    operands = Operands(rng, blocks).sharded([4]).sharded([], 0, below(4))
    made = check(operands.whole([4, 4]), functions, derivatives=2)
    assert set(made.fallbacks) <= {"GatherNd", "ScatterNd"}, made.fallbacks


def test_look_ups_across_rows() -> None:
    functions = {
        "permuted": lambda x, i: tf.gather(x, tf.range(tf.shape(x)[0])[::-1]),
        "pairs": lambda x, i: tf.gather(x, i % tf.shape(x)[0]),
        "GatherNd": lambda x, i: tf.gather_nd(x, (i % tf.shape(x)[0])[:, None]),
        "mask": lambda x, i: tf.boolean_mask(x, i > 2),
        "where": lambda x, i: tf.where(x > 0),
        "unique": lambda x, i: tf.unique(i),
        "unique counts": lambda x, i: tf.unique_with_counts(i),
        "dynamic partition": lambda x, i: tf.dynamic_partition(x, i % 2, 2),
        "mask mean": lambda x, i: tf.reduce_sum(tf.boolean_mask(x, i >= 0) * 2.0),
    }
    operands = Operands(generator(0), (1, 2)).sharded([4]).sharded([], 0, below(4))
    check(operands, functions, derivatives=1)


@pytest.mark.parametrize("kind", ["update", "add", "sub", "max", "min"])
def test_scatters(kind: str) -> None:
    scatter = getattr(
        tf,
        f"tensor_scatter_nd_{kind}",
        getattr(tf.raw_ops, f"TensorScatter{kind.title()}"),
    )
    functions = {
        "ScatterNd": lambda x, i, w: tf.scatter_nd(i[:, None], x, [5, 3]),
        "numbers": lambda x, i, w: tf.scatter_nd(i[:, None], tf.ones_like(i), [5]),
        "a row of a table": lambda x, i, w: scatter(w, [[1], [2]], w[:2] * 0.5),
        "columns": lambda x, i, w: tf.transpose(
            scatter(tf.transpose(x), [[2], [0]], tf.transpose(x[:, :2]))
        ),
        "each row": lambda x, i, w: scatter(
            x, tf.stack([tf.range(tf.shape(x)[0]), i % 3], -1), x[:, 0]
        ),
    }
    if kind == "add":
        functions["into a table"] = lambda x, i, w: scatter(w, i[:, None], x)
    operands = (
        Operands(generator(0)).sharded([3]).sharded([], 0, below(5)).whole([5, 3])
    )
    check(operands, functions, derivatives=1)


def test_variables_are_looked_up_by_rows() -> None:
    table = tf.Variable(generator(0).normal(size=(6, 3)))
    functions = {
        "ResourceGather": lambda i: tf.gather(table, i),
        "of many": lambda i: tf.nn.embedding_lookup(table, tf.stack([i, i + 1], 1)),
        "ResourceGatherNd": lambda i: tf.gather_nd(table, tf.stack([i, i % 3], 1)),
        "read": lambda i: tf.gather(table + 0.0, i) @ tf.transpose(table),
    }
    made = check(Operands(generator(0), (1, 1)).sharded([], 0, below(5)), functions)
    assert not made.fallbacks


def test_behind_pairs_of_rows_an_encoder_stays_shared_out() -> None:
    """Only what the pairs are made of is gathered, forward and backward."""
    wide = 7

    def pairwise(x: tf.Tensor, w: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        z = tf.nn.tanh(x @ w) @ v
        return tf.exp(-tf.reduce_sum((z[:, None] - z[None]) ** 2, -1))

    def halves(x: tf.Tensor, w: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
        z = tf.nn.tanh(x @ w) @ v
        return z[1:] * z[:-1]

    functions = {"pairwise": pairwise, "halves": halves}
    operands = Operands(generator(4)).sharded([3]).whole([3, wide]).whole([wide, 2])
    made = check(operands, functions, derivatives=1)
    inner = [v for v in made.traffic.gathers if v.shape and v.shape[-1] == wide]
    assert not inner and set(made.fallbacks) == {"StridedSlice"}
