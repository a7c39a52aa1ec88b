"""The shuffle: a permutation for any length and key, the same for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.training.input.permutation import permute

KEYS = st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**40))


def shuffled(n: int, key: tuple[int, int]) -> np.ndarray:
    return permute(np.arange(n), n, key)


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 4000), key=KEYS)
def test_every_number_comes_once(n, key):
    assert np.array_equal(np.sort(shuffled(n, key)), np.arange(n))


@pytest.mark.parametrize("n", range(1, 130))
def test_every_small_length_is_permuted(n):
    assert np.array_equal(np.sort(shuffled(n, (n, 1))), np.arange(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(30, 4000), seed=st.integers(0, 2**63), epoch=st.integers(0, 99))
def test_epochs_and_seeds_differ(n, seed, epoch):
    first = shuffled(n, (seed, epoch))
    assert not np.array_equal(first, shuffled(n, (seed, epoch + 1)))
    assert not np.array_equal(first, shuffled(n, (seed + 1, epoch)))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 2**62), key=KEYS, data=st.data())
def test_a_position_is_permuted_alone_as_among_others(n, key, data):
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=9)), int)
    together = permute(positions, n, key)
    alone = [int(permute(np.array(p), n, key)) for p in positions]
    assert together.tolist() == alone
    assert all(0 <= value < n for value in alone)
    assert len(set(alone)) == len(set(positions.tolist()))


def test_all_orders_of_four_come_about_equally_often():
    seeds = 4800
    orders = [tuple(shuffled(4, (seed, 0)).tolist()) for seed in range(seeds)]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    # Chi-squared with 23 degrees of freedom; 49.7 is its 99.9th percentile.
    expected = seeds / 24
    assert np.sum((counts - expected) ** 2 / expected) < 49.7


def test_values_land_everywhere_and_are_not_correlated():
    n = 10_000
    values = np.stack([shuffled(n, (5, epoch)) for epoch in range(20)])
    correlation = np.corrcoef(np.vstack([np.arange(n), values]))
    assert np.abs(correlation - np.eye(21)).max() < 0.05
    # The mean of a column over 20 epochs: n/2, plus or minus n/sqrt(12*20).
    assert abs(values.mean(0).std() / (n / np.sqrt(12 * 20)) - 1) < 0.05
    # Neighbours are separated: one pair in n/2 stays together.
    assert np.mean(np.abs(np.diff(values)) == 1) < 0.001


def test_numbers_never_change():
    # Saved runs depend on these numbers: if this fails, fix the code, not the test.
    assert shuffled(10, (0, 0)).tolist() == [2, 7, 4, 8, 0, 9, 6, 3, 1, 5]
    assert shuffled(10, (0, 1)).tolist() == [9, 7, 5, 1, 0, 6, 8, 2, 4, 3]
    large = permute(np.array([0, 1, 10**12]), 10**12 + 1, (7, 3))
    assert large.tolist() == [632898332843, 430049137551, 5729270129]
    largest = permute(np.array([0, 2**61]), 2**62, (-1, 2**40))
    assert largest.tolist() == [77460597579001191, 29806418754413205]


def test_nothing_is_permuted_outside_the_range():
    with pytest.raises(ValueError, match=r"range\(0\)"):
        permute(np.array([0]), 0, (0, 0))
    with pytest.raises(ValueError, match="outside"):
        permute(np.array([3]), 3, (0, 0))
    assert permute(np.array([], np.int64), 3, (0, 0)).shape == (0,)
