"""Batches that follow from the number of the step, read in place of stand-ins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collective.training.input.arrays import Arrays
from collective.training.input.pipeline import Batch, Input
from collective.training.steps.planned_batches import PlannedBatches
from collective.training.virtual.pieces import VirtualReplicas

ROWS, SIZE = 23, 5
X = np.arange(ROWS, dtype="float32")[:, None]


class Ranks:
    """A backend of which only the replicas are asked for."""

    elastic = True

    def __init__(self, local_replicas: range, replicas: int):
        self.local_replicas, self.replicas = local_replicas, replicas


def planned(ranks: Ranks, x: Any = X, **more: Any) -> PlannedBatches:
    inputs = Input(Arrays(x, np.arange(ROWS), None), SIZE, shuffle=False)
    return PlannedBatches(inputs, ranks, **more)


def rows(batch: Any) -> list[int]:
    return np.asarray(batch.y).tolist()


def passed(reads: PlannedBatches, passes: int) -> list[Any]:
    """Return what is read in some passes over the stand-ins."""
    found = []
    for _ in range(passes):
        iterator = iter(reads.stand_ins())
        for _ in iterator:
            reads.count(iterator)
            found.append(reads.read())
    return found


def test_a_process_reads_its_own_rows_of_each_batch_of_each_pass():
    batches = [passed(planned(Ranks(range(r, r + 1), 2)), 2) for r in range(2)]
    assert [int(batch.global_rows) for batch in batches[0]] == [5, 5, 5, 5, 3] * 2
    together = [[*rows(a), *rows(b)] for a, b in zip(*batches, strict=True)]
    assert np.concatenate(together).tolist() == [*range(ROWS), *range(ROWS)]
    assert {len(rows(batch)) for batch in batches[0]} == {2, 1}


def test_nothing_is_read_of_batches_that_are_only_counted():
    reads = planned(Ranks(range(1), 1))
    noted: list[Batch] = []
    reads.after_read.append(lambda batch, is_cut: noted.append(batch))
    iterator = iter(reads.stand_ins())
    for _ in range(3):
        next(iterator)
        reads.count(iterator)
    assert rows(reads.read()) == [10, 11, 12, 13, 14]
    assert len(noted) == 1


def test_a_batch_is_read_again_for_the_ranks_that_are_left():
    ranks = Ranks(range(1, 2), 2)
    reads = planned(ranks)
    iterator = iter(reads.stand_ins())
    reads.count(iterator)
    assert rows(reads.read()) == [2, 3, 4]
    ranks.local_replicas, ranks.replicas = range(1), 1
    assert rows(reads.read()) == [0, 1, 2, 3, 4]
    reads.count(iterator)
    assert rows(reads.read()) == [5, 6, 7, 8, 9]


def test_at_most_so_many_batches_of_a_pass():
    found = passed(planned(Ranks(range(1), 1), most=2), 2)
    assert [rows(batch)[0] for batch in found] == [0, 5, 0, 5]


def test_pieces_of_virtual_replicas():
    reads = planned(Ranks(range(1), 2), virtual=VirtualReplicas(5))
    assert rows(passed(reads, 1)[0]) == [0, 1]


@pytest.mark.parametrize("kind", ["ragged", "stream"])
def test_every_process_reads_all_rows_of_what_is_not_cut(kind):
    ranks = Ranks(range(1, 2), 2)
    if kind == "ragged":
        ragged = tf.RaggedTensor.from_row_lengths(
            tf.range(float(ROWS)), tf.ones([ROWS], tf.int64)
        )
        reads = planned(ranks, ragged)
    else:
        data = tf.data.Dataset.from_tensor_slices((X, np.arange(ROWS)))
        reads = PlannedBatches(Input(data, SIZE, shuffle=False), ranks)
    found = passed(reads, 1)
    assert np.concatenate([y for _, y in found]).tolist() == list(range(ROWS))


def test_the_specification_has_open_rows_and_the_floats_of_keras():
    reads = planned(Ranks(range(1), 1), X.astype("float64"))
    x, y = reads.spec
    assert x == tf.TensorSpec([None, 1], tf.float32)
    assert y == tf.TensorSpec([None], tf.int64)
    assert next(iter(reads.stand_ins()))[0].shape == (1, 1)
