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

from collective.training.input.agreement import Agreement
from collective.training.input.pipeline import Batch, Input
from collective.training.virtual.pieces import VirtualReplicas

#: A step or an epoch that is never reached: the number is not known beforehand.
ENDLESS = sys.maxsize


class Feed(abc.ABC):
    """Batches of successive epochs.

    Attributes:
        ended: Whether an epoch had no batch at all: none will have one.
    """

    ended: bool = False

    def begin(self, epoch: int) -> int:
        """A new training begins with this epoch.

        Returns:
            The number of its first step.
        """
        return 0

    def epochs(self, steps: int, first: int) -> int:
        """In which epoch so many steps end, the training beginning with ``first``.

        Returns:
            The number of the epoch to stop before; ``ENDLESS`` where nobody knows.
        """
        return ENDLESS

    @abc.abstractmethod
    def start(
        self, step: int, last_step: int, local_replicas: range, replicas: int
    ) -> None:
        """The training continues at a step, on these replicas.

        Args:
            step: The next step, counted over all epochs.
            last_step: The step to stop before; ``ENDLESS`` where nobody knows.
            local_replicas: The replicas of this process, consecutive numbers.
            replicas: Number of replicas in the job.
        """

    @abc.abstractmethod
    def first_step(self, epoch: int, step: int) -> int:
        """The number of an epoch's first step, the training being at ``step`` of it."""

    @abc.abstractmethod
    def steps(self, epoch: int) -> int | None:
        """How many steps the epoch has; None: until the data end."""

    @abc.abstractmethod
    def epoch(self, steps: int) -> Iterator[Batch]:
        """The batches of the current epoch that are left.

        Who asks for one more than there are lets workers of the epoch end.

        Args:
            steps: How many at most.
        """

    def close(self) -> None:
        """Ends what reads ahead. May be called twice."""


class PlannedFeed(Feed):
    """Batches whose rows follow from the number of the step.

    With ``steps_per_epoch``, epochs continue in the same pass over the rows, as in Keras;
    the last epoch of a pass is shorter where the number does not divide.

    Args:
        inputs: The plan.
        steps_per_epoch: Steps of an epoch; None: one pass over the rows.
        movable: Whether replicas may change; see ``Input.movable``.
        agreement: Compares batches that have checksums.
        virtual: The pieces that replicas hold; None: each has a share of the rows.
    """

    def __init__(
        self,
        inputs: Input,
        steps_per_epoch: int | None = None,
        movable: bool = False,
        agreement: Agreement | None = None,
        virtual: VirtualReplicas | None = None,
    ):
        self._of_pass = inputs.steps_per_epoch
        self._of_epoch = steps_per_epoch
        self._batches = inputs.movable() if movable else inputs.dataset
        self._agreement = agreement
        self._virtual = virtual
        self._origin = 0
        self._iterator: Iterator[Batch] = iter(())

    def begin(self, epoch: int) -> int:
        """As ``Feed.begin``."""
        if self._of_epoch is not None:
            self._origin = epoch  # as in Keras, the data begin with the training
        return self.first_step(epoch, 0)

    def start(
        self, step: int, last_step: int, local_replicas: range, replicas: int
    ) -> None:
        """As ``Feed.start``."""
        if self._virtual is not None:
            local_replicas = self._virtual.pieces(local_replicas, replicas)
            replicas = self._virtual.count
        self._iterator = iter(self._batches(step, last_step, local_replicas, replicas))

    def first_step(self, epoch: int, step: int) -> int:
        """As ``Feed.first_step``, whatever the step."""
        return self._bounds(epoch)[0]

    def steps(self, epoch: int) -> int:
        """As ``Feed.steps``."""
        first, last = self._bounds(epoch)
        return last - first

    def epochs(self, steps: int, first: int) -> int:
        """As ``Feed.epochs``."""
        self.begin(first)
        epoch = first
        while self._bounds(epoch)[0] < steps:
            epoch += 1
        return epoch

    def epoch(self, steps: int) -> Iterator[Batch]:
        """As ``Feed.epoch``."""
        for batch in itertools.islice(self._iterator, steps):
            if self._agreement is not None and batch.checksum is not None:
                self._agreement.check(int(batch.global_rows), int(batch.checksum))
            yield batch._replace(checksum=None)

    def _bounds(self, epoch: int) -> tuple[int, int]:
        """First and last step of an epoch, half-open."""
        if self._of_epoch is None:
            return epoch * self._of_pass, (epoch + 1) * self._of_pass
        of_pass, of_epoch = self._of_pass, self._of_epoch
        number, part = divmod(epoch - self._origin, -(-of_pass // of_epoch))
        first = number * of_pass + part * of_epoch
        return first, min(first + of_epoch, (number + 1) * of_pass)


def warn_of_short_epochs(inputs: Input, steps_per_epoch: int | None) -> None:
    """Warns as Keras does where a pass over the rows is no whole number of epochs."""
    if steps_per_epoch and inputs.steps_per_epoch % steps_per_epoch:
        warnings.warn(
            f"steps_per_epoch={steps_per_epoch} does not divide the "
            f"{inputs.steps_per_epoch} batches of the data: the last epoch of each pass "
            "over the data is shorter, as in Keras",
            stacklevel=4,
        )
