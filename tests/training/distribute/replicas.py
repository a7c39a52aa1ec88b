"""Shared by the tests of a strategy on ranks: its values, and comparisons with them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf


def equal(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-6)


def context():
    return tf.distribute.get_replica_context()


def local(strategy, value):
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(value)]


def read(strategy, dataset):
    """Return the rows of this rank in each batch."""
    batches = strategy.experimental_distribute_dataset(dataset)
    return [local(strategy, batch)[0] for batch in batches]
