"""The batches of a training, an epoch at a time, for one process.

The loop asks a ``Feed`` for the batches of an epoch and needs not know whether their
number follows from arithmetic (``PlannedFeed``) or shows when the data end
(``collective.training.input.batches``).
"""

from __future__ import annotations

import abc
import itertools
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training.input.pipeline import Batch, Input, ReadAhead
from collective.training.input.tape import Place
from collective.training.process.object_collectives import total

if TYPE_CHECKING:
    from collective.training.virtual.pieces import VirtualReplicas

#: A step or an epoch that is never reached: the number is not known beforehand.
ENDLESS = sys.maxsize


class Feed(abc.ABC):
    """Batches of successive epochs."""

    ended: bool = False  # whether an epoch had no batch at all: none will have one
    # Whether Keras has asked for one batch more than there are to find the end of an epoch.
    overran: bool = False

    def epochs(self, steps: int) -> int:
        """Return the epoch to stop before, for so many steps; ``ENDLESS`` if unknown."""
        return ENDLESS

    @abc.abstractmethod
    def start(
        self, place: Place, last_step: int, local_replicas: range, replicas: int
    ) -> None:
        """Continue the training at a place, on these replicas.

        Args:
            place: How many epochs of this training have ended, and the next step,
                counted over all epochs.
            last_step: The step to stop before; ``ENDLESS`` where it is not known.
            local_replicas: The replicas of this process, consecutive numbers.
            replicas: Number of replicas in the job.
        """

    @abc.abstractmethod
    def bounds(self, epoch: int, step: int) -> tuple[int, int]:
        """First and last step of an epoch, half-open, counted over all epochs.

        The last is ``ENDLESS`` if the epoch ends with the data. ``step`` is where
        the training is, in this epoch.
        """

    @abc.abstractmethod
    def epoch(self, steps: int) -> Iterator[Batch]:
        """Return the batches of the current epoch that are left, so many at most.

        Who asks for one more than there are lets workers of the epoch end.
        """

    def close(self) -> None:
        """End what reads ahead. May be called twice."""


class PlannedFeed(Feed):
    """Batches whose rows follow from the number of the step.

    With ``steps_per_epoch``, epochs continue in the same pass over the rows, as in Keras;
    the last epoch of a pass is shorter if the number does not divide.

    Args:
        backend: Whose ranks compare batches that have checksums. With an elastic one,
            replicas may change: see ``Input.movable``.
        steps_per_epoch: Steps of an epoch. If None, one pass over the rows.
        first_epoch: The first of the training; with ``steps_per_epoch``, the data begin
            with it, as in Keras.
        virtual: The pieces that replicas hold. If None, each has a share of the rows.
    """

    def __init__(
        self,
        inputs: Input,
        backend: Backend,
        steps_per_epoch: int | None = None,
        first_epoch: int = 0,
        virtual: VirtualReplicas | None = None,
    ):
        if steps_per_epoch and inputs.steps_per_epoch % steps_per_epoch:
            warnings.warn(
                f"steps_per_epoch={steps_per_epoch} does not divide the "
                f"{inputs.steps_per_epoch} batches of the data: the last epoch of each "
                "pass over the data is shorter, as in Keras",
                stacklevel=3,
            )
        self._of_pass = inputs.steps_per_epoch
        self._of_epoch = steps_per_epoch
        self._batches = inputs.movable() if backend.elastic else inputs.read_ahead
        self._agreement = Agreement(backend)
        self._virtual = virtual
        self._first_epoch = first_epoch
        self._reads: ReadAhead | None = None

    def epochs(self, steps: int) -> int:
        """See ``Feed.epochs``."""
        epoch = self._first_epoch
        while self.bounds(epoch)[0] < steps:
            epoch += 1
        return epoch

    def start(
        self, place: Place, last_step: int, local_replicas: range, replicas: int
    ) -> None:
        """See ``Feed.start``."""
        _, step = place
        if self._virtual is not None:
            local_replicas = self._virtual.pieces(local_replicas, replicas)
            replicas = self._virtual.count
        self.close()
        self._reads = self._batches(step, last_step, local_replicas, replicas)

    def bounds(self, epoch: int, step: int = 0) -> tuple[int, int]:
        """See ``Feed.bounds``; the bounds do not depend on the step."""
        of_pass, of_epoch = self._of_pass, self._of_epoch
        if of_epoch is None:
            return epoch * of_pass, (epoch + 1) * of_pass
        number, part = divmod(epoch - self._first_epoch, -(-of_pass // of_epoch))
        first = number * of_pass + part * of_epoch
        return first, min(first + of_epoch, (number + 1) * of_pass)

    def epoch(self, steps: int) -> Iterator[Batch]:
        """See ``Feed.epoch``."""
        assert self._reads is not None
        for batch in itertools.islice(self._reads, steps):
            yield self._agreement.checked(batch)

    def close(self) -> None:
        """See ``Feed.close``."""
        if self._reads is not None:
            self._reads.close()


class Agreement:
    """Compares the batch of each step between ranks that read whole batches."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._sum = total(backend)

    def checked(self, batch: Batch) -> Batch:
        """Return the batch without its checksum, after a comparison if it has one."""
        if batch.checksum is not None:
            self.check(int(batch.global_rows), int(batch.checksum))
        return batch._replace(checksum=None)

    def check(self, rows: int, checksum: int) -> None:
        """Compare one batch; every rank calls it.

        Args:
            rows: Of the whole batch; -1 where the data have ended.
            checksum: The checksum of the whole batch, less than 2**53.

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
