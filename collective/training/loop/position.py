"""Where a training is: epoch, step, and what it has added up so far.

``ObservedFit`` moves it forward. ``take`` makes a ``State`` of it, which a checkpoint writes and
an elastic job broadcasts; ``restore`` is the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training.loop.reports import Reports
from collective.training.loop.state import (
    Gathered,
    State,
    newest,
    random_state,
    values_of,
)
from collective.training.model.record import record_of
from collective.training.model.variables import (
    all_variables,
    outside_variables,
)
from collective.training.process.object_collectives import gather_few
from collective.training.sharding import held
from collective.training.steps.report import LOSS


class Position:
    """The position of a training between two steps.

    Args:
        gathers: Whether ``gather`` gathers, for rank 0 to write a checkpoint.

    Attributes:
        epoch: The current epoch, from 0.
        step: The next step; steps count on over epochs.
        start: The state to start from, until the first epoch after it begins. Rank 0's
            from a checkpoint, None for a new training.
        final: The state after the last step of an incomplete last epoch, from which a
            longer training continues.
        reports: The reports of the current epoch, or None between epochs.
        initial_epoch: The epoch with which a new training begins.
        epochs: The numbers of the finished epochs.
        history: Logs of each finished epoch, by name.
        losses: Of every step of the finished epochs.
        unit: Runs what all ranks do together, again where one of them has died.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        gathers: bool = False,
        initial_epoch: int = 0,
    ):
        self.model = model
        self.backend = backend
        self.epoch = self.step = 0
        self.start: State | None = None
        self.final: State | None = None
        self.reports: Reports | None = None
        self.initial_epoch = initial_epoch
        self.epochs: list[int] = []
        self.history: dict[str, list[float]] = {}
        self.losses: list[float] = []
        self.unit: Callable[[Callable[[], Any]], Any] = lambda attempt: attempt()
        self._gathers = gathers
        self._losses = np.zeros(0)  # ``losses`` at the start of the epoch

    @property
    def stopped(self) -> bool:
        """Return whether a callback has ended the training."""
        return bool(self.model.stop_training)

    def agree_on_start(self) -> bool:
        """Give every rank the newest state to start from; return False if no rank has one."""
        if not gather_few(self.backend, [self.start is not None]).any():
            return False
        self.start, _ = newest(self.start or self.fresh(), self.backend)
        self.backend.broadcast(outside_variables(self.model))
        return True

    def fresh(self) -> State:
        """Return the state before the first step of a new training.

        Without the global random generators: a new training leaves them alone.
        """
        return State(0, 0, values_of(self.model))

    def latest(self) -> State:
        """Return the state that this rank would continue from, were it interrupted now."""
        return self.start or self.final or self.take()

    def take(
        self,
        buffers: Sequence[np.ndarray] | None = None,
        gathered: Gathered | None = None,
    ) -> State:
        """Return the state now.

        Args:
            buffers: Arrays to copy the variables into; see ``values_of``.
            gathered: What ``gather`` returned. Without it a state lacks shards and errors
                of other ranks: it is enough to hand on in an elastic job.
        """
        hook = record_of(self.model).hook
        losses, last, reports = self._losses, np.zeros(0), self.reports
        if reports is not None:
            last = reports.last().copy()
            losses = np.concatenate([losses, self._epoch_losses(reports)])
        return State(
            self.epoch,
            self.step,
            values_of(self.model, buffers, gathered),
            last,
            losses,
            {name: list(values) for name, values in self.history.items()},
            random_state(self.model),
            self.stopped,
            {} if hook is None else hook.values(gathered or {}),
        )

    def take_whole(self) -> State:
        """Return the state now, for a checkpoint. Every rank calls it."""
        return self.take(gathered=self.unit(self.gather))

    def gather(self) -> Gathered:
        """Return variables held in parts whole, and errors of a hook added up, on rank 0.

        Every rank calls it.
        """
        if not self._gathers:
            return {}
        hook = record_of(self.model).hook
        found: dict[int, np.ndarray] = {} if hook is None else hook.gather()
        return found | held.gathered(all_variables(self.model), self.backend.rank == 0)

    def restore(self) -> None:
        """Move to ``start``; ``put`` then changes the model."""
        self.final = self.reports = None
        if self.start is None:
            return
        start, hook = self.start, record_of(self.model).hook
        if hook is not None and start.step != self.step:
            hook.forget()  # of a step that others have made without this rank
        self.epoch, self.step, self._losses = start.epoch, start.step, start.losses
        # In place: the result of the training has the same objects.
        self.losses[:] = start.losses.tolist()
        self.history.clear()
        self.history |= {name: list(values) for name, values in start.history.items()}
        self.epochs[:] = range(self.initial_epoch, self.epoch)

    def check_before(self, last_step: int) -> None:
        """Refuse a state beyond the steps that were asked for.

        Raises:
            UsageError: It is.
        """
        if self.step > last_step:
            raise UsageError(
                f"the training is at step {self.step} already, and "
                f"{last_step} steps were asked for",
                hint="more --steps or --epochs, or another --checkpoint-dir",
            )

    def check_within(self, epoch: int, first: int, whole: int) -> None:
        """Refuse a state that is at no step of an epoch, nor at its end.

        Args:
            first, whole: The steps of the epoch, half-open.

        Raises:
            UsageError: It is not.
        """
        if not first <= self.step <= whole:
            raise UsageError(
                f"the checkpoint is at step {self.step}, which is none of epoch "
                f"{epoch}: steps {first} to {whole}",
                hint="resume with the steps_per_epoch= and initial_epoch= of before",
            )

    def begin(self, first_step: int) -> None:
        """Begin a new training with ``initial_epoch``, whose first step this is."""
        self.epoch, self.step = self.initial_epoch, first_step

    def put(self) -> None:
        """Give the model the variables of ``start``, if there is one."""
        if self.start is not None:
            self.start.put(self.model)

    def begin_epoch(self) -> None:
        """Begin the steps of an epoch, or continue from the middle of one."""
        last = None
        if self.start is not None and self.start.within_epoch:
            self.put()  # without what callbacks at the start of the epoch have changed
            last = self.start.sums
        self.reports = Reports(self.model, last)
        self.start = None

    def end_epoch(self, logs: dict[str, float]) -> None:
        """Finish the epoch, its validation included."""
        assert self.reports is not None
        self.losses += self._epoch_losses(self.reports)
        self._losses = np.array(self.losses)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)
        self.epochs.append(self.epoch)
        self.reports = None
        self.epoch += 1

    def _epoch_losses(self, reports: Reports) -> list[float]:
        return [float(values[LOSS]) for values in reports.read()]
