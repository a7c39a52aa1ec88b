"""Pieces of one device take turns: one begins when the one before it has ended."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from collective.training.partition.turns import Turns
from tests.training.partition.partitioned import Partitioned, assert_same

_COUNTS = [2, 3, 1]


def ancestors(op: tf.Operation) -> set[str]:
    """Return the names of all operations that an operation waits for."""
    found: set[str] = set()
    stack = [op]
    while stack:
        one = stack.pop()
        for before in [*(t.op for t in one.inputs), *one.control_inputs]:
            if before.name not in found:
                found.add(before.name)
                stack.append(before)
    return found


def made(partitioned: Partitioned, kind: str) -> list[tf.Operation]:
    """Return the operations of a type in the order in which they were emitted."""
    graph = partitioned._emitted.graph
    return [op for op in graph.get_operations() if op.type == kind]


def gradients(x, y, weights, more):
    """Return the loss and the gradients of two layers."""
    with tf.GradientTape() as tape:
        tape.watch([weights, more])
        found = tf.matmul(tf.tanh(tf.matmul(x, weights)), more)
        loss = tf.reduce_sum(tf.square(found - y))
    return [loss, *tape.gradient(loss, [weights, more])]


def arrays() -> list[np.ndarray]:
    """Return six rows of inputs and of targets, and two weights."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=size) for size in ((6, 4), (6, 2), (4, 5), (5, 2))]


def equal_to_whole(partitioned: Partitioned, given: list[np.ndarray]) -> None:
    """Compare with the function as it was traced."""
    got = partitioned(_COUNTS, given)
    want = partitioned.whole(given)
    assert_same(want, got, [f"output {i}" for i in range(len(want))], 1e-12)


def test_a_piece_begins_when_the_one_before_has_ended():
    given = arrays()
    partitioned = Partitioned(gradients, given, [True, True, False, False], replicas=3)
    equal_to_whole(partitioned, given)
    products = made(partitioned, "MatMul")
    by_node = [products[i : i + 3] for i in range(0, len(products), 3)]
    assert len(by_node) == 5, products  # two forward, three backward
    for piece in (1, 2):
        before = ancestors(by_node[0][piece])
        assert {node[piece - 1].name for node in by_node} <= before
        assert not {node[piece].name for node in by_node} & before


def test_gradients_of_a_piece_are_added_before_the_next_begins():
    given = arrays()
    partitioned = Partitioned(gradients, given, [True, True, False, False], replicas=3)
    first = made(partitioned, "MatMul")[:3]
    shapes = [tf.TensorShape([4, 5]), tf.TensorShape([5, 2])]
    sums = [op for op in made(partitioned, "AddV2") if op.outputs[0].shape in shapes]
    assert len(sums) == 4  # of two gradients, two each
    earlier = {op.name for op in sums} & ancestors(first[2])
    assert len(earlier) == 2


def test_all_pieces_arrive_where_rows_meet_and_take_turns_again():
    def function(x, weights):
        centred = tf.matmul(x, weights)
        centred = centred - tf.reduce_mean(centred, 0)
        return [tf.reduce_sum(tf.exp(tf.matmul(centred, weights)), 0)]

    rng = np.random.default_rng(1)
    given = [rng.normal(size=(6, 4)), rng.normal(size=(4, 4))]
    partitioned = Partitioned(function, given, [True, False], replicas=3)
    equal_to_whole(partitioned, given)
    first, second = np.split(np.array(made(partitioned, "MatMul"), object), 2)
    for piece in range(3):
        assert {op.name for op in first} <= ancestors(second[piece])
    for piece in (1, 2):
        assert first[piece - 1].name in ancestors(first[piece])
        assert second[piece - 1].name in ancestors(second[piece])


def test_waiting_within_a_piece_does_not_join_pieces():
    """Gradients wait for what they need last; each piece for its own alone."""

    def function(x, weights, more):
        early = tf.matmul(x, weights)
        with tf.control_dependencies([early]):
            late = tf.matmul(x, more)
        return [tf.reduce_sum(late + early, 0)]

    rng = np.random.default_rng(2)
    given = [rng.normal(size=size) for size in ((6, 4), (4, 4), (4, 4))]
    partitioned = Partitioned(function, given, [True, False, False], replicas=3)
    equal_to_whole(partitioned, given)
    early, late = np.split(np.array(made(partitioned, "MatMul"), object), 2)
    assert early[0].name in ancestors(late[0])
    assert early[1].name not in ancestors(late[0])
    assert late[0].name in ancestors(early[1])


def test_what_does_more_than_compute_waits_for_all_pieces():
    def function(x):
        first = tf.debugging.check_numerics(x * 2, "first")
        with tf.control_dependencies([first]):
            second = tf.debugging.check_numerics(x * 3, "second")
        return [tf.reduce_sum(first + second, 0)]

    given = [np.random.default_rng(3).normal(size=(6, 4))]
    partitioned = Partitioned(function, given, [True], replicas=3)
    equal_to_whole(partitioned, given)


@pytest.mark.parametrize(
    ("replicas", "devices", "waits"),
    [(4, 2, [1, 3]), (2, 2, []), (3, 1, [1, 2]), (5, 2, [1, 2, 4])],
)
def test_pieces_of_other_devices_do_not_wait(replicas, devices, waits):
    with tf.Graph().as_default():
        turns, ops = Turns(replicas, devices), []
        for replica in range(replicas):
            with turns.of(replica):
                ops.append(tf.constant(1.0).op)
        turns.made([op] for op in ops)
        turns.end()
        for replica, op in enumerate(ops):
            expected = {ops[replica - 1].name} if replica in waits else set()
            assert {o.name for o in ops} & ancestors(op) >= expected
            assert bool(ancestors(op)) == (replica in waits)
