"""The pieces of a replica, and the tree over them."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from collective.training.virtual.pieces import VirtualReplicas
from collective.training.virtual.tree import Tree

COUNTS = (1, 2, 3, 5, 6, 8, 13)


@pytest.mark.parametrize("count", COUNTS)
def test_every_piece_is_held_once(count):
    virtual = VirtualReplicas(count)
    for total in range(1, count + 1):
        held = [list(virtual.pieces(range(r, r + 1), total)) for r in range(total)]
        assert [piece for own in held for piece in own] == list(range(count))
        assert max(map(len, held)) - min(map(len, held)) <= 1
        assert list(virtual.pieces(range(total), total)) == list(range(count))


@pytest.mark.parametrize("count", COUNTS)
def test_subtrees_cover_the_pieces_of_a_replica(count):
    virtual = VirtualReplicas(count)
    for total in range(1, count + 1):
        for replica, subtrees in enumerate(virtual.all_subtrees(total)):
            covered = [
                piece
                for start, level in subtrees
                for piece in range(start, start + (1 << level))
            ]
            assert covered == list(virtual.pieces(range(replica, replica + 1), total))
            assert all(start % (1 << level) == 0 for start, level in subtrees)


def test_a_replica_sends_few_subtrees():
    virtual = VirtualReplicas(64)
    for total in range(1, 65):
        for subtrees in virtual.all_subtrees(total):
            assert len(subtrees) <= 2 * virtual.levels


def of_numpy(values: np.ndarray, start: int, level: int) -> np.ndarray:
    """Return the sum of a node, by its definition."""
    if level == 0:
        return values[start]
    first = of_numpy(values, start, level - 1)
    second = start + (1 << level - 1)
    return (
        first + of_numpy(values, second, level - 1) if second < len(values) else first
    )


@pytest.mark.parametrize(
    "count",
    [2, 3, 5, *(pytest.param(n, marks=pytest.mark.matrix) for n in (1, 6, 8, 13))],
)
def test_the_sum_has_the_same_bits_for_any_number_of_replicas(count):
    """They are the bits of the tree, which no other order of these numbers gives."""
    virtual = VirtualReplicas(count)
    rng = np.random.default_rng(count)
    values = rng.normal(size=(count, 500)) * 10.0 ** rng.integers(-6, 6, (count, 500))
    values = values.astype("float32")
    values[:, 0], values[:, 1] = -0.0, 0.0
    wanted = of_numpy(values, *virtual.root)
    if count > 3:
        assert (np.add.accumulate(values)[-1] != wanted).any()

    for total in range(1, count + 1):
        sums = []
        for replica in range(total):
            local = range(replica, replica + 1)
            tree = Tree(virtual, SimpleNamespace(replicas=total, local_replicas=local))
            own = virtual.pieces(local, total)
            sums += tree.of_subtrees([tf.constant(values[piece]) for piece in own])
        found = tree.finish(sums).numpy()
        np.testing.assert_array_equal(found.view("int32"), wanted.view("int32"))
