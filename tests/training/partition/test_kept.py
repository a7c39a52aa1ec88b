"""What a step holds in memory, told from its graph."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from collective.training.partition.kept import Kept
from tests.training.partition.partitioned import Partitioned

ROWS, WIDTH = 8, 16


def step(x, first, second):
    """Return a loss of a row, and two gradients."""
    with tf.GradientTape() as tape:
        tape.watch([first, second])
        hidden = tf.tanh(tf.matmul(x, first))
        loss = tf.reduce_sum(tf.square(tf.matmul(hidden, second)))
    return [loss, *tape.gradient(loss, [first, second])]


def kept(function, *shapes: tuple[int, ...], own: int = ROWS) -> Kept:
    """Return what is kept in a function of rows and of weights, all float64."""
    given = [np.zeros(shape) for shape in shapes]
    has_rows = [not i for i in range(len(given))]
    partition = Partitioned(function, given, has_rows, replicas=1).partition
    return Kept(partition, ROWS, own)


def test_the_largest_that_the_backward_pass_reads_come_first():
    found = kept(step, (ROWS, 4), (4, WIDTH), (WIDTH, 2)).for_backward()
    sizes = {value.node.type: size for value, size in found}
    assert found[0][1] == ROWS * WIDTH * 8
    assert sizes["Tanh"] == ROWS * WIDTH * 8
    assert sizes["MatMul"] == ROWS * 2 * 8
    assert [size for _, size in found] == sorted(sizes.values(), reverse=True)


def test_a_rank_holds_its_rows_and_whole_sums():
    shapes = (ROWS, 4), (4, WIDTH), (WIDTH, 2)
    ((value, size), *_) = kept(step, *shapes, own=2).for_backward()
    assert value.node.type == "Tanh"
    assert size == 2 * WIDTH * 8


def test_micro_batches_hold_a_part_of_what_is_made_between_exchanges():
    def chain(x, weights):
        for _ in range(4):
            x = tf.matmul(x, weights)
        return [tf.reduce_sum(x, 0)]

    found = kept(chain, (ROWS, WIDTH), (WIDTH, WIDTH))
    row = ROWS * WIDTH * 8
    assert found.peak() == 2 * row  # a product and what it is made of
    assert found.peak(4) <= 2 * row // 4 + 4 * WIDTH * 8


def test_micro_batches_hold_all_that_crosses_an_exchange():
    def coupled(x, weights):
        centred = tf.matmul(x, weights)
        centred = tf.exp(centred - tf.reduce_mean(centred, 0))
        return [tf.reduce_sum(centred, 0)]

    found = kept(coupled, (ROWS, WIDTH), (WIDTH, WIDTH))
    assert found.peak(4) >= ROWS * WIDTH * 8


def test_gradients_of_pieces_do_not_add_up():
    shapes = (ROWS, 4), (4, 512), (512, 2)
    weights = (4 * 512 + 512 * 2) * 8
    found = kept(step, *shapes)
    assert found.peak(4) < found.peak() + weights
