"""Receipts for the rows that each replica has read, added up in the first sum of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.training.input.pipeline import Batch
from collective.training.input.plan import share
from collective.training.observers.ledger.observer import BYTES, SIZE
from collective.training.observers.ledger.writer import mark
from collective.training.steps.batch_function import BatchFunction, StepObserver
from collective.training.steps.program import Program
from collective.training.virtual.pieces import VirtualReplicas


class Receipts(StepObserver):
    """The receipts of the rows of each step of a training.

    Args:
        virtual: The pieces that replicas hold. If None, each has a share of the rows.
    """

    def __init__(self, backend: Backend, virtual: VirtualReplicas | None):
        self._backend, self._virtual = backend, virtual
        self._sharing = backend.options.tensor_parallel  # ranks that read the same rows
        with tf.device("CPU"):
            self._own = tf.Variable(
                tf.zeros([backend.most_replicas, SIZE]), trainable=False
            )
        self._program: Program | None = None

    def attached(self) -> list[tf.Tensor]:
        """Return the receipts of this process, while a step is traced."""
        return [self._own.read_value()]

    def note(self, batch: Batch, is_cut: bool) -> None:
        """Write the receipts for what this process has read of a batch.

        Args:
            is_cut: Whether it has read its own rows only.
        """
        backend, read = self._backend, np.asarray(batch.rows_read)
        receipts = np.zeros([backend.most_replicas, SIZE], np.float32)
        for rank in backend.local_replicas:
            replica, place = divmod(rank, self._sharing)
            if place:  # the first of those that read the same rows has the receipt
                continue
            own = read
            if (
                not is_cut or len(backend.local_replicas) > 1
            ):  # what was read is cut then
                start, stop = self._share(int(batch.global_rows), replica)
                own = read[(read[:, 0] >= start) & (read[:, 0] < stop)]
            if len(own):
                receipts[replica] = receipt(own)
        self._own.assign(receipts)

    def _share(self, rows: int, replica: int) -> tuple[int, int]:
        """Return which rows of a batch a replica has, half-open."""
        replicas, virtual = self._backend.replicas // self._sharing, self._virtual
        if virtual is None:
            return share(rows, replica, replicas)
        pieces = virtual.pieces(range(replica, replica + 1), replicas)
        start, _ = share(rows, pieces.start, virtual.count)
        return start, share(rows, pieces.stop - 1, virtual.count)[1]

    def before_step(
        self, function: BatchFunction, program: Program, tensors: Sequence[tf.Tensor]
    ) -> None:
        """Note the program, which has the sum of all receipts after its step."""
        if function.name == "train_step":
            self._program = program

    @property
    def total(self) -> tf.Tensor:
        """Return the receipts of all replicas in the last step: ``[replicas, SIZE]``."""
        assert self._program is not None
        return self._program.attached[-1]


def receipt(read: np.ndarray) -> list[int]:
    """Return the receipt for rows, number by number byte by byte: ``SIZE`` integers.

    Args:
        read: int64 ``[n, 2]``, n > 0: the place of each row in the batch, and its number.
    """
    numbers = read[0, 0], read[-1, 0] + 1, mark(read[:, 1])
    return [number // 256**place % 256 for number in numbers for place in range(BYTES)]
