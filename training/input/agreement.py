"""Before a step, ranks that read whole batches compare them: all have the same one."""

from __future__ import annotations

import numpy as np

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training.exchange import total


class Agreement:
    """Compares the batch of each step, by a small message.

    Args:
        backend: Whose ranks compare.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._sum = total(backend)

    def check(self, rows: int, checksum: int) -> None:
        """Compares one batch; every rank calls it.

        Args:
            rows: Of the whole batch; -1 where the data have ended.
            checksum: Of the whole batch, less than 2**53.

        Raises:
            UsageError: On every rank: the ranks have different batches.
        """
        if self._backend.size == 1:
            return
        by_rank = np.zeros((self._backend.size, 2))
        by_rank[self._backend.rank] = rows, checksum
        by_rank = self._sum(by_rank)
        if (by_rank == by_rank[0]).all():
            return
        rank = int(np.argmax((by_rank != by_rank[0]).any(axis=1)))
        rows, others = int(by_rank[0, 0]), int(by_rank[rank, 0])
        if min(rows, others) < 0:
            ended, goes_on = (0, rank) if rows < 0 else (rank, 0)
            what = f"the data of rank {ended} have ended, those of rank {goes_on} go on"
        elif rows != others:
            what = f"rank {rank} has a batch of {others} rows where rank 0 has {rows}"
        else:
            what = f"rank {rank} has other rows in this batch than rank 0"
        raise UsageError(
            what,
            hint="give every rank the same batches in the same order, each takes its "
            "share of them: a shuffle needs a seed (dataset.shuffle(n, seed=1), "
            "keras.utils.set_random_seed(1) first), and a generator must not depend on "
            "the rank",
        )
