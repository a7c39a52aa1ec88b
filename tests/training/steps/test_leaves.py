"""What a batch is, and which of its tensors are cut by rows."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from collective.training.input.pipeline import Batch
from collective.training.steps import leaves
from collective.training.steps.leaves import Leaves
from collective.training.steps.program import Kind


def test_a_batch_is_read_as_a_tree():
    ragged = tf.ragged.constant([[1, 2], [3]])
    data = ({"b": np.ones((2, 3)), "a": tf.zeros([4, 1])}, None, ragged, 5)
    found = Leaves.of(data)
    assert [tuple(t.shape) for t in found.tensors] == [(4, 1), (2, 3), (3,), (3,)]
    assert list(found.data[0]) == ["b", "a"] and found.data[1] is None
    again = Leaves.of(({"a": np.zeros((4, 1), "float32"), "b": tf.ones([2, 3], "float64")},
                       None, ragged, 5))  # fmt: skip
    assert found.kind == again.kind
    assert found.kind != Leaves.of((*data[:3], 6)).kind


def test_the_rows_are_the_common_length_of_most_data():
    batch = Leaves.of((np.ones((2, 3)), np.ones((2,)), np.ones((6, 3)), np.float64(1)))
    can = leaves.dense(leaves.spec_of(batch.data))
    assert can == [True, True, True, False]
    assert leaves.cut_by_rows(batch.tensors, can) == [False, False, True, False]
    few = Leaves.of((np.ones((2, 30)), np.ones((2,)), np.ones((6, 3))))
    can = leaves.dense(leaves.spec_of(few.data))
    assert leaves.cut_by_rows(few.tensors, can) == [True, True, False]


def test_ragged_and_sparse_tensors_are_not_cut():
    data = tf.ragged.constant([[1, 2], [3]]), tf.sparse.from_dense(tf.eye(3))
    batch = Leaves.of(data)
    assert leaves.dense(leaves.spec_of(batch.data)) == [False] * len(batch.tensors)
    assert leaves.cut_by_rows(batch.tensors, [False] * 5) == [False] * 5


def test_a_kind_serves_batches_whose_cut_leaves_have_one_length():
    spec = (tf.TensorSpec([None, 2]), tf.TensorSpec([None]), None)
    both, first = Kind(spec, (True, True)), Kind(spec, (True, False))

    def batch(x: int, y: int) -> Leaves:
        return Leaves.of((np.ones((x, 2)), np.ones((y,)), None))

    assert both.fits(batch(4, 4)) and not both.fits(batch(4, 5))
    assert first.fits(batch(4, 5))
    assert Kind(spec, (True, True), 4).fits(batch(4, 4))
    assert not Kind(spec, (True, True), 4).fits(batch(5, 5))


def test_a_batch_of_which_own_rows_were_read_is_cut():
    own = Batch(tf.ones([2, 3]), tf.ones([2]), None, tf.constant(5, tf.int64))
    batch = Leaves.of(own)
    assert [tuple(t.shape) for t in batch.tensors] == [(2, 3), (2,), ()]
    assert batch.lengths == [5, 5] and len(batch.data) == 2
    spec = tf.TensorSpec([None, 3]), tf.TensorSpec([None])
    kind = Kind(spec, (True, True), 5, is_read_cut=True)
    assert kind.fits(batch)
    assert [s.shape.as_list() for s in kind.whole_specs()] == [[5, 3], [5]]
    assert [s.shape.rank for s in kind.specs()] == [2, 1, 0]
    assert kind.specs()[0].shape.as_list() == [None, 3]
    spec = (tf.TensorSpec([None, 2]), tf.TensorSpec([None]), None)
    both = Kind(spec, (True, True))
    packed = both.packed([tf.zeros([1, 2]), tf.zeros([1])])
    assert packed[2] is None and packed[0].shape == (1, 2)
