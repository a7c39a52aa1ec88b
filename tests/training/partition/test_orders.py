"""Running sums, rolls and segments along the rows, each compared with one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collective.training.partition.explain import gathered_bytes
from tests.training.partition.meeting import on_two_ranks
from tests.training.partition.operands import (
    BLOCKS,
    Operands,
    check,
    generator,
    left_out,
    unit,
)


def _along(axis: int) -> dict[str, Any]:
    """Functions that move what is along an axis."""
    functions: dict[str, Any] = {
        "backwards": lambda x: tf.reverse(x, [axis]),
        "both": lambda x: tf.roll(x, [1, 2], [axis, 2]),
        "twice": lambda x: tf.roll(x, [1, 2], [axis, axis]),
        "by the rows": lambda x: tf.roll(x, tf.shape(x)[axis] // 2, axis),
    }
    for shift in (0, 1, -2, 9):
        functions[f"roll {shift}"] = lambda x, by=shift: tf.roll(x, by, axis)
    for name in ("cumsum", "cumprod", "cumulative_logsumexp"):
        for exclusive in (False, True):
            for reverse in (False, True):
                of = getattr(tf.math, name)
                functions[f"{name} {exclusive} {reverse}"] = (
                    lambda x, of=of, exclusive=exclusive, reverse=reverse: of(
                        x, axis, exclusive=exclusive, reverse=reverse
                    )
                )
    return functions


@pytest.mark.parametrize("seed", [left_out(0), 1, left_out(2)])
def test_along_the_rows(seed: int) -> None:
    axis = seed % 2
    operands = Operands(generator(seed), BLOCKS[seed]).sharded([3, 4], axis, unit)
    made = check(operands, _along(axis), derivatives=1, tolerance=1e-9)
    alone = {"Cumsum", "Cumprod", "CumulativeLogsumexp"}
    assert len(operands.blocks) > 1 or not alone.intersection(made.fallbacks)


def test_of_a_roll_only_rows_that_move_are_sent() -> None:
    x = np.random.default_rng(0).normal(size=(7, 8))

    def function(x: tf.Tensor) -> list[tf.Tensor]:
        moved = tf.roll(x, 2, 0)
        return [moved, tf.cumsum(x), tf.cumsum(x, exclusive=True, reverse=True)]

    want = [np.roll(x, 2, 0), np.cumsum(x, 0), np.cumsum(x[::-1], 0)[::-1] - x]
    for counts in ([4, 3], [0, 7], [6, 1], [7, 0]):
        for found in on_two_ranks(function, x, counts):
            for a, b in zip(want, found, strict=True):
                np.testing.assert_allclose(b, a, 1e-12, 1e-12)
    rolled = {"rolled": lambda x: tf.reduce_sum(tf.roll(x, 1, 0) * x)}
    operands = Operands(generator(0)).sharded([8])
    made = check(operands, rolled, derivatives=1)
    assert not made.fallbacks
    read = [v for v in made.traffic.gathers if v not in made.partition.graph.outputs]
    assert not read and gathered_bytes(made.partition, made.traffic)


@pytest.mark.parametrize("blocks", [(1,), left_out((2,))])
def test_segments(blocks: tuple[int, ...]) -> None:
    def numbers(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.sort(x[:, 0, 0] * 7), tf.int32)

    functions = {
        "sum": lambda x, i: tf.math.segment_sum(x, i),
        "mean": lambda x, i: tf.math.segment_mean(x, i),
        "sorted": lambda x, i: tf.math.segment_mean(x * 2, numbers(x)),
        "of numbers": lambda x, i: tf.math.segment_sum(x[:, 0, 0], i),
        "largest": lambda x, i: tf.math.segment_max(x, i),
        "back": lambda x, i: tf.gather(tf.math.segment_mean(x, i), i),
    }
    operands = Operands(generator(1), blocks).sharded([3, 2], 0, unit)

    def sorted_(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.arange(np.prod(shape), dtype="int32").reshape(shape) // 3

    made = check(operands.sharded([], 0, sorted_), functions, derivatives=1)
    assert not {"SegmentSum", "SegmentMean"}.intersection(made.fallbacks)
