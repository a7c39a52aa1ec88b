"""Rules of shapes, each compared with one process."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.training.partition.operands import (
    BLOCKS,
    Operands,
    check,
    generator,
    left_out,
)
from tests.training.partition.partitioned import Partitioned, assert_same


@pytest.mark.parametrize("blocks", [(1,), (2,), left_out((1, 1)), (1, 2)])
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
    # For "split rows".
    assert made.fallbacks == (["Reshape"] if len(blocks) > 1 else [])


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_squeeze_that_names_no_axes(rows: int) -> None:
    """A part has one row or none; the whole tensor has a fixed number of rows."""

    def function(x: tf.Tensor) -> list[tf.Tensor]:
        flat, with_row = tf.squeeze(x), tf.squeeze(x, [1])
        return [flat * 2.0, with_row, tf.squeeze(x[:, 0] if rows > 1 else x, None)]

    x = np.arange(rows * 4.0).reshape(rows, 1, 4)
    made = Partitioned(function, [x], [True], replicas=3, is_static=True)
    for counts in ([rows, 0, 0], [0, rows, 0], [rows - 1, 0, 1]):
        assert_same(made.whole([x]), made(counts, [x]), ["all", "one", "other"], 0)
    assert not made.fallbacks


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


@pytest.mark.parametrize("seed", [left_out(0), left_out(1), 2])
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
