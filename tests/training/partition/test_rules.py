"""Rules of shapes, reductions, products, slices and look-ups, each against the whole."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.training.partition.operands import (
    BLOCKS,
    Operands,
    below,
    check,
    complex_,
    generator,
    raw,
    truth,
)

# --- shapes ------------------------------------------------------------------------

pytestmark = pytest.mark.trains  # for seconds: not in make check


@pytest.mark.parametrize("blocks", [(1,), (2,), (1, 1), (1, 2)])
def test_reshapes(blocks: tuple[int, ...]) -> None:
    k = sum(blocks)
    # x: [n, 4, 6]
    functions = {
        "flat rows": lambda x: tf.reshape(x, [tf.shape(x)[0], 24]),
        "-1 first": lambda x: tf.reshape(x, [-1, 24]),
        "-1 last": lambda x: tf.reshape(x, [tf.shape(x)[0], 2, -1]),
        "all flat": lambda x: tf.reshape(x, [-1]),
        "rows times four": lambda x: tf.reshape(x, [-1, 6]),
        "back": lambda x: tf.reshape(tf.reshape(x, [-1, 6]), [-1, 4, 6]),
        "split rows": lambda x: tf.reshape(x, [-1, k, 4, 6]),
        "ones": lambda x: tf.reshape(x, [1, -1, 1, 24]),
        "fewer": lambda x: tf.reshape(x, [-1, 48]),  # two rows in one, if there are two
        "expand": lambda x: tf.expand_dims(tf.expand_dims(x, 0), -1),
        "squeeze": lambda x: tf.squeeze(x[:, None, :, None], [1, 3]),
        "behind": lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [4, -1]),
        "mixed": lambda x: tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 6]),
        "mixed and back": lambda x: tf.transpose(
            tf.reshape(tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 6]), [4, -1, 6]),
            [1, 0, 2],
        ),
    }
    del functions["fewer"]
    if k == 2:
        functions["fewer"] = lambda x: tf.reshape(x, [-1, 48])
    made = check(
        Operands(generator(k), blocks).sharded([4, 6]), functions, derivatives=2
    )
    assert made.fallbacks == (["Reshape"] if len(blocks) > 1 else [])  # of "split rows"


@pytest.mark.parametrize("seed", range(3))
def test_transposes_tiles_and_pads(seed: int) -> None:
    axis = seed
    around = np.array([[1, 2], [0, 1], [2, 0]])
    around[axis] = 0
    functions = {
        "Transpose": lambda x: tf.transpose(x, [2, 0, 1]),
        "Reverse": lambda x: tf.transpose(x),
        "Tile": lambda x: tf.tile(x, [2, 1, 3]),
        "Tile all": lambda x: tf.tile(x, [3, 2, 2]),
        "Pad": lambda x: tf.pad(x, around),
        "PadV2": lambda x: tf.pad(x, around, constant_values=7.0),
        "MirrorPad": lambda x: tf.pad(x, around, "REFLECT"),
        "Symmetric": lambda x: tf.pad(x, around, "SYMMETRIC"),
        "broadcast": lambda x: tf.broadcast_to(x, tf.concat([[2], tf.shape(x)], 0)),
        "repeat": lambda x: tf.repeat(x, 2, axis),
        "repeat others": lambda x: tf.repeat(x, 2, (axis + 1) % 3),
    }
    operands = Operands(generator(seed), BLOCKS[seed + 2]).sharded([3, 4], axis)
    made = check(operands, functions, derivatives=1)
    assert not made.fallbacks
    pads = {"rows": lambda x: tf.pad(x, np.array([[1, 2], [1, 1], [1, 1]]))}
    check(operands, pads, derivatives=1)


@pytest.mark.parametrize("seed", range(3))
def test_joins(seed: int) -> None:
    blocks = BLOCKS[seed + 2]
    functions = {
        "along rows": lambda x, y, w: tf.concat([x, y], 1),
        "thrice": lambda x, y, w: tf.concat([x, y, x], 1),
        "with whole": lambda x, y, w: tf.concat([x, w], 1),
        "across": lambda x, y, w: tf.concat([x, y], 0),
        "across whole": lambda x, y, w: tf.concat([w, x], -1),
        "Pack": lambda x, y, w: tf.stack([x, y], 0),
        "Pack behind": lambda x, y, w: tf.stack([x, w], -1),
        "Unpack": lambda x, y, w: tf.unstack(x, 3, axis=0),
        "Unpack last": lambda x, y, w: tf.unstack(y, 2, axis=2),
        "Split": lambda x, y, w: tf.split(y, 2, 2),
        "SplitV": lambda x, y, w: tf.split(x, [1, 2], 0),
        "Split back": lambda x, y, w: tf.split(tf.concat([x, y], 1), 2, 1),
    }
    operands = Operands(generator(seed), blocks).sharded([3, 2], 1).sharded([3, 2], 1)
    made = check(operands.counted([3, 2], 1), functions, derivatives=2)
    assert not made.fallbacks
    sums = {
        "ConcatV2": lambda x, y: tf.concat([x, y], 0),
        "Pack": lambda x, y: tf.stack([x, y], 1),
        "Reshape": lambda x, y: tf.reshape(x, [2, 2]),
        "Transpose": lambda x, y: tf.transpose(tf.reshape(x, [2, 2])),
        "Slice": lambda x, y: tf.slice(x, [1], [2]),
        "StridedSlice": lambda x, y: x[1:, None],
        "Split": lambda x, y: tf.split(x, 2),
        "Sum": lambda x, y: tf.reduce_sum(tf.reshape(x, [2, 2]), 0),
    }
    made = check(Operands(generator(seed)).partial([4]).whole([4]), sums, derivatives=1)
    assert not made.fallbacks
    assert not made.traffic.gathers


def test_questions_of_shape() -> None:
    functions = {
        "Shape": lambda x: tf.shape(x),
        "ShapeN": lambda x: tf.raw_ops.ShapeN(input=[x, x + 1]),
        "Size": lambda x: tf.size(x),
        "Rank": lambda x: tf.raw_ops.Rank(input=x),
        "Range": lambda x: tf.range(tf.shape(x)[1]),
        "numbers": lambda x: (
            tf.range(tf.shape(x)[1])[:, None] + tf.cast(x[0, :], tf.int32)
        ),
        "LinSpace": lambda x: tf.linspace(0.0, 1.0, tf.shape(x)[1]),
        "Fill": lambda x: (
            tf.fill([tf.shape(x)[1], 3], 3.0) + tf.cast(tf.round(x[0]), tf.float32)
        ),
        "ones": lambda x: tf.ones([2, tf.shape(x)[1], 3], x.dtype) * x[0],
        "BroadcastTo": lambda x: (
            tf.broadcast_to(tf.range(3, dtype=x.dtype), [tf.shape(x)[1], 3]) * x[0]
        ),
        "divided": lambda x: x / tf.cast(tf.shape(x)[1], x.dtype),
    }
    operands = Operands(generator(0), (1, 2)).sharded([2, 3], 1)
    made = check(operands, functions, derivatives=1)
    assert not made.fallbacks
    assert len(made.traffic.gathers) <= len(functions)  # the results themselves


def test_sizes_that_a_short_batch_has_not() -> None:
    def but(x: tf.Tensor, count: int) -> tf.Tensor:
        return tf.shape(x)[0] - count

    functions = {
        "behind three": lambda x: x[3:] - x[: tf.maximum(but(x, 3), 0)],
        "but three": lambda x: tf.shape(x[: but(x, 3)]),
        "negative": lambda x: tf.ones(tf.shape(x[:-2])) + tf.cast(x[:-2], tf.float32),
        "crossing": lambda x: tf.shape(x[1 : but(x, 2)]),
        "but one": lambda x: tf.ones(tf.shape(x[1:]), x.dtype) * x[:-1],
        "chosen": lambda x: tf.shape(tf.boolean_mask(x, x[:, 0] > 1)[:-1]),
        "larger": lambda x: tf.maximum(but(x, 1), 0),
    }
    for seed in range(4):  # batches of one and more rows
        check(Operands(generator(seed)).sharded([3]), functions, derivatives=1)


# --- reductions ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_reductions(seed: int) -> None:
    axis = seed % 3
    kinds = {
        "Sum": tf.reduce_sum,
        "Mean": tf.reduce_mean,
        "Max": tf.reduce_max,
        "Min": tf.reduce_min,
        "Prod": tf.reduce_prod,
    }
    functions = {
        f"{name} {axes} {keep}": lambda x, f=f, axes=axes, keep=keep: f(x, axes, keep)
        for name, f in kinds.items()
        for axes in (axis, (axis + 1) % 3, None, [0, 2], [-1])
        for keep in (False, True)
    }
    functions |= {
        "L2Loss": tf.nn.l2_loss,
        "variance": lambda x: tf.math.reduce_variance(x, axis),
        "moments": lambda x: tf.nn.moments(x, [0, 1, 2]),
        "norm": lambda x: tf.norm(x),
        "logsumexp": lambda x: tf.reduce_logsumexp(x, axis),
        "nothing": lambda x: tf.reduce_sum(x, []),
    }
    operands = Operands(generator(seed), BLOCKS[1 + seed]).sharded([2, 3], axis)
    made = check(operands, functions, derivatives=1 + (seed == 0))
    assert set(made.fallbacks) <= {"Cumprod", "Reshape"}  # of the gradient of Prod


def test_reductions_of_other_dtypes() -> None:
    for values, names in (
        (below(5), "Sum Max Min Prod"),
        (truth, "All Any"),
        (complex_, "Sum Mean Prod"),
    ):
        functions = {
            f"{name} {axes}": lambda x, f=name, axes=axes: raw(f, x, axes)
            for name in names.split()
            for axes in ([0], [1], [0, 1])
        }
        operands = Operands(generator(0), (1, 2)).sharded([3], 0, values)
        assert not check(operands, functions).fallbacks
    functions = {"Mean": lambda x: tf.reduce_mean(x)}  # of whole numbers: divided last
    check(Operands(generator(1)).sharded([3], 0, below(9)), functions)
    halves = {
        f"{dtype} {f.__name__}": lambda x, f=f, dtype=dtype: f(tf.cast(x, dtype))
        for f in (tf.reduce_mean, tf.reduce_sum, tf.reduce_max)
        for dtype in (tf.float16, tf.bfloat16, tf.float32)
    }
    check(Operands(generator(1)).sharded([3]), halves, tolerance=1e-2)


@pytest.mark.parametrize("seed", range(3))
def test_along_axes(seed: int) -> None:
    axis = seed
    other = (axis + 1) % 3
    functions = {
        "ArgMax": lambda x: tf.argmax(x, other),
        "ArgMin": lambda x: tf.argmin(x, other, tf.int32),
        "Cumsum": lambda x: tf.cumsum(x, other),
        "reverse": lambda x: tf.cumsum(x, other, exclusive=True, reverse=True),
        "Cumprod": lambda x: tf.math.cumprod(x, other),
        "CumulativeLogsumexp": lambda x: tf.math.cumulative_logsumexp(x, other),
        "ReverseV2": lambda x: tf.reverse(x, [other]),
        "Roll": lambda x: tf.roll(x, 2, other),
        "Roll both": lambda x: tf.roll(x, [1, 2], [other, (axis + 2) % 3]),
    }
    operands = Operands(generator(seed), BLOCKS[1 + seed]).sharded([2, 3], axis)
    made = check(operands, functions, derivatives=2)
    assert not made.fallbacks
    across = {
        "ArgMax": lambda x: tf.argmax(x, axis),
        "Cumsum": lambda x: tf.cumsum(x, axis),
        "Cumprod": lambda x: tf.math.cumprod(x, axis),
        "ReverseV2": lambda x: tf.reverse(x, [axis]),
        "Roll": lambda x: tf.roll(x, 2, axis),
        "sort": lambda x: tf.sort(x, axis),
        "TopK": lambda x: tf.math.top_k(
            tf.transpose(x, [other, 3 - axis - other, axis])
        )[0],
    }
    check(operands, across, derivatives=1)


def test_sequences_and_counts() -> None:
    rng = generator(0)
    functions = {
        "ReverseSequence": lambda x, n: tf.reverse_sequence(x, n, 1, 0),
        "swapped": lambda x, n: tf.reverse_sequence(tf.transpose(x), n, 0, 1),
        "of batches": lambda x, n: tf.reverse_sequence(
            tf.transpose(x), [1, 2, 0, 3], 1, 0
        ),
    }
    operands = Operands(rng, (1, 2)).sharded([4]).sharded([], 0, below(4))
    check(operands, functions, derivatives=1)
    counts = {
        "DenseBincount": lambda x, w: tf.math.bincount(
            tf.reshape(x, [-1]), minlength=7, maxlength=7
        ),
        "each": lambda x, w: tf.math.bincount(x, minlength=7, maxlength=7, axis=-1),
        "binary": lambda x, w: tf.math.bincount(
            x, minlength=7, maxlength=7, axis=-1, binary_output=True
        ),
        "weighted": lambda x, w: tf.math.bincount(
            x, weights=w, minlength=7, maxlength=7, axis=-1
        ),
        "Bincount": lambda x, w: tf.raw_ops.Bincount(arr=x, size=7, weights=w),
        "binary of all": lambda x, w: tf.raw_ops.DenseBincount(
            input=tf.reshape(x, [-1]), size=7, weights=w[0, :0], binary_output=True
        ),
    }
    operands = Operands(rng).sharded([3], 0, below(7)).sharded([3])
    check(operands, counts)


@pytest.mark.parametrize("seed", range(2))
def test_segments(seed: int) -> None:
    rng = generator(seed)
    kinds = {
        "Sum": tf.math.unsorted_segment_sum,
        "Max": tf.math.unsorted_segment_max,
        "Min": tf.math.unsorted_segment_min,
        "Prod": tf.math.unsorted_segment_prod,
        "mean": tf.math.unsorted_segment_mean,
    }
    functions = {n: lambda x, i, f=f: f(x, i, 5) for n, f in kinds.items()}
    functions |= {
        "flat": lambda x, i: tf.math.unsorted_segment_sum(
            tf.reshape(x, [-1]), tf.repeat(i, 3), 5
        ),
        "by row numbers": lambda x, i: tf.math.unsorted_segment_sum(
            x, tf.range(tf.shape(x)[0]), tf.shape(x)[0]
        ),
        "columns": lambda x, i: tf.math.unsorted_segment_sum(
            tf.transpose(x), [0, 2, 2], 5
        ),
    }
    operands = Operands(rng, BLOCKS[2 + seed]).sharded([3]).sharded([], 0, below(5))
    made = check(operands, functions, derivatives=1 + seed)
    assert not made.fallbacks


# --- products ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_products(seed: int) -> None:
    blocks = BLOCKS[1 + seed]
    functions = {
        "MatMul": lambda x, y, w: x @ w,
        "transposed": lambda x, y, w: tf.matmul(
            w, x, transpose_a=True, transpose_b=True
        ),
        "over rows": lambda x, y, w: tf.matmul(x, y, transpose_a=True),
        "rows by rows": lambda x, y, w: tf.matmul(x, y, transpose_b=True),
        "each": lambda x, y, w: tf.matmul(x[:, None], y[:, :, None]),
        "BatchMatMulV2": lambda x, y, w: tf.matmul(x[:, :, None], y[:, None]) @ w,
        "broadcast": lambda x, y, w: tf.matmul(
            w[None], x[:, :, None], transpose_a=True
        ),
        "batches first": lambda x, y, w: tf.matmul(
            tf.stack([x, y]), tf.stack([w, w * 2])
        ),
        "dot": lambda x, y, w: tf.einsum("bi,bi->b", x, y),
        "all": lambda x, y, w: tf.einsum("bi,bi->", x, y),
        "outer": lambda x, y, w: tf.einsum("bi,bj->ij", x, y),
        "dots": lambda x, y, w: tf.einsum("...i,ij->...j", x, w),
        "three": lambda x, y, w: tf.einsum("bi,ij,bi->bj", x, w, y),
        "pairs": lambda x, y, w: tf.einsum("bi,ci->bc", x, y),
        "tensordot": lambda x, y, w: tf.tensordot(x, w, 1),
        "matvec": lambda x, y, w: tf.linalg.matvec(x, w[:, 0]),
    }
    operands = Operands(generator(seed), blocks).sharded([3]).sharded([3]).whole([3, 3])
    made = check(operands, functions, derivatives=2 if seed == 0 else 1)
    assert not made.fallbacks


def test_products_of_columns() -> None:
    functions = {
        "MatMul": lambda x, y: x @ tf.transpose(y),
        "contracted": lambda x, y: tf.matmul(x, y, transpose_b=True),
        "diagonal": lambda x, y: tf.einsum("ib,ib->b", x, y),
        "with whole": lambda x, y: tf.einsum("ib,jb->ij", x, y),
        "of numbers": lambda x, y: tf.matmul(
            tf.cast(x * 9, tf.int32), tf.ones([4, 2], tf.int32), transpose_a=True
        ),
    }
    operands = Operands(generator(0), (1, 2)).sharded([4], 1).counted([4], 1)
    assert not check(operands, functions, derivatives=1).fallbacks


# --- slices --------------------------------------------------------------------------


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


# --- look-ups ------------------------------------------------------------------------


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
    assert made.fallbacks == ["StatelessShuffle", "TopKV2"]  # of all rows


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
