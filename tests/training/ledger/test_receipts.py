"""Receipts of each replica for the rows that its process has read."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from collective.backends.options import Options
from collective.training.input.pipeline import Batch
from collective.training.observers.ledger.observer import read_receipts
from collective.training.observers.ledger.receipts import Receipts
from collective.training.observers.ledger.writer import mark
from collective.training.virtual.pieces import VirtualReplicas

NUMBERS = np.array([7, 2**40 + 3, 52, 1, 9], np.int64)


class Ranks:
    """A backend of which only the replicas are asked for."""

    def __init__(self, local_replicas: range, replicas: int, tensor_parallel: int = 1):
        self.local_replicas, self.replicas = local_replicas, replicas
        self.most_replicas = replicas
        self.options = Options(tensor_parallel=tensor_parallel)


def batch(start: int, stop: int) -> Batch:
    """Return a batch of 5 rows, of which those at some places were read."""
    read = np.stack([np.arange(start, stop), NUMBERS[start:stop]], axis=1)
    return Batch(None, None, None, tf.constant(5, tf.int64), tf.constant(read))


def noted(
    ranks: Ranks, read: Batch, is_cut: bool = True, virtual: int | None = None
) -> list[tuple[int, int, int]]:
    pieces = None if virtual is None else VirtualReplicas(virtual)
    receipts = Receipts(ranks, pieces)
    receipts.note(read, is_cut)
    (own,) = receipts.attached()
    return read_receipts(np.asarray(own).ravel())


def test_a_receipt_is_for_all_rows_that_a_process_has_read():
    wrong = noted(Ranks(range(1, 2), 2), batch(1, 5))  # one row too early
    assert wrong == [(0, 0, 0), (1, 5, mark(NUMBERS[1:]))]
    assert noted(Ranks(range(1, 2), 2), batch(2, 2)) == [(0, 0, 0)] * 2


@pytest.mark.parametrize("local", [range(1, 2), range(3)])
def test_rows_that_are_read_whole_are_cut_for_the_replicas(local):
    found = noted(Ranks(local, 3), batch(0, 5), is_cut=False)
    for replica, (start, stop) in enumerate([(0, 1), (1, 3), (3, 5)]):
        wanted = start, stop, mark(NUMBERS[start:stop])
        assert found[replica] == (wanted if replica in local else (0, 0, 0))


def test_the_first_of_the_ranks_that_read_the_same_rows_has_the_receipt():
    of_second = [(0, 0, 0), (2, 5, mark(NUMBERS[2:])), (0, 0, 0), (0, 0, 0)]
    assert noted(Ranks(range(2, 3), 4, 2), batch(2, 5)) == of_second
    assert noted(Ranks(range(3, 4), 4, 2), batch(2, 5)) == [(0, 0, 0)] * 4


def test_pieces_of_virtual_replicas_are_counted_together():
    found = noted(Ranks(range(2), 2), batch(0, 5), virtual=3)
    assert [receipt[:2] for receipt in found] == [(0, 1), (1, 5)]
