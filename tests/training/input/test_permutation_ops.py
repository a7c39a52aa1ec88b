"""The order of rows as operations of a graph: the same as by NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from collective.training.input.permutation import permute
from collective.training.input.permutation_ops import permuted


@pytest.mark.parametrize("n", [1, 2, 3, 50, 1000, 70_000])
@pytest.mark.parametrize("seed", [0, 3, -5, 2**40])
def test_it_is_that_of_numpy(n, seed):
    in_graph = tf.function(lambda epoch: permuted(n, seed, epoch))
    for epoch in (0, 1, 9):
        found = in_graph(tf.constant(epoch, tf.int64)).numpy()
        np.testing.assert_array_equal(found, permute(np.arange(n), n, (seed, epoch)))
