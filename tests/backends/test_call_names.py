"""Names of collectives in graphs."""

from __future__ import annotations

import tensorflow as tf

from collective.backends.call_names import CallNames


def test_calls_in_loops_have_the_name_of_the_function():
    """The names of loop bodies have numbers, which differ between ranks."""
    names, found = CallNames(), []

    def body(step):
        found.append(names.next())
        return step + 1

    @tf.function
    def train():
        body(0)
        return tf.while_loop(lambda step: step < 3, body, [0])

    train()
    assert found == ["sums_1_of_train", "sums_2_of_train"]
    assert names.next() is None
