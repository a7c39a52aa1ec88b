"""Values that wait until others are sent."""

from __future__ import annotations

import pytest
import tensorflow as tf

from collective.training.partition import window
from collective.training.partition.window import Window


class Gradient:
    """A value of so many elements."""

    dtype = tf.float32

    def __init__(self, elements: int):
        self.shape = (elements,)


@pytest.mark.parametrize(
    ("sizes", "opened"),
    [
        # Each gate by the gradient behind which there is room.
        ([4, 4, 4, 4, 4], [[2], [3], [4], [], []]),
        ([9, 9, 9, 9], [[2], [3], [], []]),  # two at least, however large
        ([1, 1, 1, 9, 1], [[], [3], [4], [], []]),
        ([1, 1, 1], [[], [], []]),
    ],
)
def test_a_gradient_waits_until_there_is_room(sizes, opened, monkeypatch):
    monkeypatch.setattr(window, "UNSENT_BYTES", 4 * 10)
    with tf.Graph().as_default():
        made, values = Window(), [Gradient(size) for size in sizes]
        gates = [made.gate(value) for value in values]
        found = made.opened_by([Gradient(100), *values])  # the first has no gate
    assert found[0] == []
    assert found[1:] == [[gates[i] for i in of] for of in opened]
