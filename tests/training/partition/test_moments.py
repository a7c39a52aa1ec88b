"""BatchNormalization by rows: a mean and its variance in one exchange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf

from tests.training.partition.partitioned import Partitioned, assert_same

SCALE = np.array([1.0, 2.0, 0.5], np.float32)
NAMES = ["normal", "mean", "variance", "of x", "of scale"]


def normalized(x: tf.Tensor, scale: tf.Tensor) -> Sequence[tf.Tensor]:
    """Compute like Keras' BatchNormalization, with the gradients of a loss."""
    with tf.GradientTape() as tape:
        tape.watch([x, scale])
        mean, variance = tf.nn.moments(x, [0, 1], keepdims=True)
        normal = tf.nn.batch_normalization(
            x, tf.squeeze(mean), tf.squeeze(variance), None, scale, 1e-3
        )
        loss = tf.reduce_mean(tf.sin(normal))
    return [normal, mean, variance, *tape.gradient(loss, [x, scale])]


def rows(offset: float, dtype: type = np.float32) -> np.ndarray:
    """Return rows that differ so much that the means of replicas differ."""
    x = (
        np.random.default_rng(0).normal(size=(9, 4, 3))
        * np.arange(1, 10)[:, None, None]
    )
    return (x + offset).astype(dtype)


@pytest.mark.parametrize("counts", [[4, 5], [9, 0], [1, 8, 0]])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_layers_exchange_once_forward_and_once_backward(counts, dtype):
    args = [rows(0, dtype), SCALE.astype(dtype)]
    made = Partitioned(normalized, args, [True, False], replicas=len(counts))
    tolerance = 1e-5 if dtype == np.float32 else 1e-13
    assert_same(made.whole(args), made(counts, args), NAMES, tolerance)
    if dtype == np.float32:
        forward, backward = made.traffic.sums
        assert [value.node.type for value in forward] == ["Variance"]
        assert len(backward) == 2
    assert len(made.traffic.sums) <= 3 and not made.traffic.gathers[3:]


@pytest.mark.parametrize("offset", [1e3, -1e4])
def test_nothing_cancels_where_the_mean_is_large(offset):
    args = [rows(offset), SCALE]
    made = Partitioned(normalized, args, [True, False], replicas=2)
    _, mean, variance, *_ = made([4, 5], args)
    wide = args[0].astype(np.float64)
    np.testing.assert_allclose(mean.ravel(), wide.mean((0, 1)), 1e-6)
    np.testing.assert_allclose(variance.ravel(), wide.var((0, 1)), 2e-5)


@pytest.mark.parametrize("axes", [[1], [0, 1], [0, 1, 2]])
def test_along_other_axes_and_of_what_is_whole(axes):
    def moments(x, table):
        return [
            *tf.nn.moments(x, axes, keepdims=True),
            *tf.nn.moments(table, axes, keepdims=True),
        ]

    args = [rows(1), rows(2)]
    made = Partitioned(moments, args, [True, False], replicas=2)
    assert "Variance" in made.types
    assert_same(made.whole(args), made([4, 5], args), ["a", "b", "c", "d"], 1e-5)
