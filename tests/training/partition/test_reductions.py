"""Rules of reductions, each compared with one process."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.training.partition.operands import (
    BLOCKS,
    Operands,
    below,
    check,
    complex_,
    generator,
    left_out,
    raw,
    truth,
)


@pytest.mark.parametrize("seed", [0, left_out(1), 2, left_out(3)])
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
    assert set(made.fallbacks) <= {"Cumprod", "Reshape"}  # from the gradient of Prod


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
    # For whole numbers, division comes last.
    functions = {"Mean": lambda x: tf.reduce_mean(x)}
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
