"""PowerSGD: its messages, its state, and its training."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from collective.errors import UsageError
from collective.training.compression import PowerSGD
from collective.training.compression.savings import elements_sent

# Widths and inputs of VGG-16's convolutions and dense layers.
CONVOLUTIONS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
DENSE = ((25088, 4096), (4096, 4096), (4096, 1000))


def vgg16() -> list[tuple[int, ...]]:
    inputs = (3, *CONVOLUTIONS[:-1])
    kernels = [(3, 3, n, m) for n, m in zip(inputs, CONVOLUTIONS, strict=True)]
    kernels += DENSE
    return [shape for kernel in kernels for shape in (kernel, kernel[-1:])]


def test_the_bytes_of_vgg16():
    shapes = vgg16()
    numbers = sum(map(math.prod, shapes))
    assert numbers == 138_357_544  # keras.applications.VGG16 has the same number
    sent = elements_sent(PowerSGD(rank=4), shapes)
    by_hand = 0
    for shape in shapes:
        n, m = math.prod(shape[:-1]), shape[-1]
        by_hand += 4 * (n + m) if len(shape) > 1 else m
    assert sent == by_hand == 333_940
    assert numbers > 414 * sent


@pytest.mark.parametrize(
    "shape, compressed",
    [
        ((64, 64), True),
        ((3, 3, 8, 64), True),
        ((16, 16), True),  # 256 numbers, and 128 are sent
        ((16, 15), False),
        ((4096,), False),
        ((), False),
        ((1, 4096), False),
        ((0, 64), False),
    ],
)
def test_only_what_becomes_smaller_is_compressed(shape, compressed):
    hook = PowerSGD(rank=4)
    assert hook.compresses(shape) == compressed
    assert elements_sent(hook, [shape]) <= math.prod(shape)


def exchange(hook, matrices):
    """Make one step of several replicas without errors; return the first one's sent part."""
    (start,) = hook.start(matrices[0].shape, 0)
    done = []

    def replica(number: int, first_sums: list) -> None:
        """Run replicas one after another: each gets the sums of all messages."""
        calls = iter(first_sums)
        done.append(
            hook.exchange(
                [tf.constant(matrices[number])],
                [[tf.constant(start)]],
                lambda tensors: (
                    next(calls, None) or [tf.zeros_like(t) for t in tensors]
                ),
            )
        )

    p = [sum(tf.constant(m) @ start for m in matrices)]
    basis = tf.linalg.qr(p[0]).q
    q = [sum(tf.matmul(m, basis, transpose_a=True) for m in matrices)]
    for number in range(len(matrices)):
        replica(number, [p, q])
    return done


def test_what_was_sent_adds_up_to_the_total():
    rng = np.random.default_rng(0)
    matrices = list(rng.normal(size=(3, 20, 9)))
    done = exchange(PowerSGD(2), matrices)
    total = done[0].totals[0].numpy()
    np.testing.assert_allclose(sum(one.sent[0].numpy() for one in done), total)
    for one, matrix in zip(done, matrices, strict=True):
        np.testing.assert_array_equal(one.totals[0], total)
        left = np.linalg.norm(matrix - one.sent[0])
        assert 0 < left <= np.linalg.norm(matrix)  # a projection
    assert np.linalg.matrix_rank(total) == 2


def test_a_matrix_of_that_rank_is_exact():
    rng = np.random.default_rng(1)
    matrix = rng.normal(size=(20, 2)) @ rng.normal(size=(2, 9))
    (done,) = exchange(PowerSGD(2), [matrix])
    np.testing.assert_allclose(done.totals[0], matrix, rtol=1e-12, atol=1e-12)


def test_a_gradient_of_zeros_is_sent_and_forgotten():
    (done,) = exchange(PowerSGD(2), [np.zeros((20, 9))])
    assert not done.totals[0].numpy().any()
    assert np.isfinite(done.shared[0][0]).all()


def test_the_rank_is_a_number_from_one_up():
    with pytest.raises(UsageError, match="rank 0"):
        PowerSGD(rank=0)
