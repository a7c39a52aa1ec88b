"""Ranks of a training under Keras' own ``fit`` that leave or join it between two steps.

Deaths are the business of ``FitUnits``. Ranks that leave or wait to join are announced in
the sum of each step, so every rank knows of them at the end of the same step. A rank that
joins gets the state then, and reads its data over to the position, as a training does that
is resumed; the others wait for it in their next unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from collective.backends.base import Backend
from collective.backends.capabilities import Elastic
from collective.elastic import generations
from collective.elastic.preemption import LEAVES, RESTARTS, WAITING
from collective.errors import CollectiveError, LeaveJob
from collective.training.loop.callbacks import CallbackMethods
from collective.training.loop.observed_fit import ObservedFit
from collective.training.loop.observer import FinishedStep, Observer
from collective.training.loop.state import newest
from collective.training.observers.checkpoint.schedule import Checkpoint
from collective.training.observers.elastic import endings
from collective.training.observers.elastic.change import Change
from collective.training.observers.elastic.fit_units import FitUnits
from collective.training.observers.elastic.state_handoff import StateHandoff
from collective.training.verification.ranks import compare_newcomers

_has_joined = False  # whether this process has joined a job, in a training


def check_trainings(backend: Backend) -> None:
    """Refuse a further training of ranks that joined in another one, and are left alone.

    Their scripts have made fewer trainings than those of the ranks that began the job.

    Raises:
        CollectiveError: On rank 0.
    """
    if _has_joined and backend.rank == 0:
        raise CollectiveError(
            "the ranks that began the job have ended, and this one joined them in an "
            "earlier training: its script would repeat trainings that they have made",
            hint="one collective.fit for all epochs in a job that grows (--max-np)",
            everywhere=False,
        )


def _join(backend: Backend) -> Change:
    """Join the running job, without any of its state yet."""
    global _has_joined
    assert isinstance(backend, Elastic)
    former = backend.enter()
    _has_joined = True
    return Change(former, len(former), time.perf_counter())


class CallbackMemory(Observer):
    """Gives every rank the state of the callbacks at the end of each epoch.

    So ``EarlyStopping`` continues to count when rank 0 dies. State that methods of batches
    have gathered since the last epoch is lost with rank 0.
    """

    def __init__(self, methods: CallbackMethods):
        self._methods = methods

    def end_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Share the state when the callbacks have ended the epoch."""
        self._methods.share_memory()


class FitMembership(Observer):
    """Lets ranks go and admits others, between two steps.

    Args:
        observed: The training.
        plan: What a kept state must have in common with the training.
        checkpoint: It gets a last state when too few ranks are left.
        on_join: Called when ranks have joined.

    Attributes:
        description: What ranks that join must have in common with the others, by name.
    """

    def __init__(
        self,
        units: FitUnits,
        observed: ObservedFit,
        plan: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        on_join: Callable[[], None],
    ):
        self.description: dict[str, str] = {}
        self._units, self._observed, self._checkpoint = units, observed, checkpoint
        self._position = observed.position
        self._backend = observed.position.backend
        self._handoff = StateHandoff(observed.position, plan)
        self._on_join = on_join
        options = self._backend.options
        self._least, self._grows = options.min_np or 1, options.max_np is not None
        units.training = self

    @property
    def joins(self) -> bool:
        """Return whether this rank has still to join the others."""
        return self._backend.joins

    @property
    def continues_others(self) -> bool:
        """Return whether the state may be that of an earlier generation of the job."""
        return self._handoff.possible and generations.number() > 0

    @property
    def step(self) -> int:
        """Return the number of the next step."""
        return self._position.step

    @property
    def is_reading_over(self) -> bool:
        """Return whether this rank has joined, and reads what the others have read."""
        return self._observed.is_reading_over

    def find_start(self) -> None:
        """Find the state to start from, the same on every rank, which all call it."""
        generations.wait_for_previous()
        position = self._position

        def found() -> Any:
            self._handoff.find()
            if self._checkpoint is not None:
                self._checkpoint.find_start()
            position.agree_on_start()
            return position.start

        position.start = self._units.run(found)
        self._handoff.taken()

    def join(self) -> None:
        """Join the ranks that train, with a model that has all of its variables."""
        change = _join(self._backend)
        self._units.join(change.former, change.noticed)
        generations.wait_for_previous()

    def admit(self, is_new: bool) -> None:
        """Give ranks that join the state of the others; every rank calls it."""
        position, backend = self._position, self._backend
        mine = position.fresh() if is_new else position.latest()
        with endings.rejecting(backend, is_new):
            compare_newcomers(backend, self.description)
            state, _ = newest(mine, backend)
            if is_new:
                position.start = state
                self._observed.take_over()
        self._on_join()

    def changed(self, root: int) -> None:
        """Tell the observers of a change of the ranks."""
        self._observed.reconfigured(root)

    def after_step(self, step: FinishedStep) -> None:
        """Act on what the ranks have announced.

        Raises:
            LeaveJob: This rank leaves.
            NextGeneration: The launcher asks for the job's next generation.
        """
        units, backend = self._units, self._backend
        said, units.announced = units.announced, None
        if said is None or self._is_over:
            return
        if backend.size < self._least:
            units.between_steps(self._wait_for_ranks)
            return
        if (said & RESTARTS).any():
            units.between_steps(self._begin_next_generation)
        leaving = np.flatnonzero(said & LEAVES).tolist()
        if not leaving and not (said & WAITING).any():
            return
        stay = backend.size - len(leaving)
        if stay < self._least and not (stay and self._grows):
            self.give_up(stay, backend.size)
        if backend.rank not in leaving:
            units.change(leaving)
            return
        self._observed.leave()  # before another rank takes over the files
        assert isinstance(backend, Elastic)
        backend.leave()
        raise LeaveJob

    @property
    def _is_over(self) -> bool:
        return self._observed.is_over

    def continues_with(self, left: int) -> bool:
        """Return whether so many ranks are enough to go on."""
        finished = self._position.epoch >= self._observed.epochs or self._is_over
        return left >= self._least or self._grows or finished

    def _wait_for_ranks(self) -> bool:
        """Wait for ranks that join; end the job if none comes in time."""
        flags, restart = self._units.preemption_flags, self._begin_next_generation
        if not endings.wait_for_ranks(self._backend, self._least, flags, restart):
            self.give_up(*self._units.gone)
        return True

    def _begin_next_generation(self) -> bool:
        """Keep the state and end every rank; return False if no host can keep it."""
        endings.begin_next_generation(self._backend, self._handoff, self._checkpoint)
        return False

    def give_up(self, left: int, size: int) -> None:
        """End the job, with a checkpoint if the user asked for checkpoints.

        Raises:
            CollectiveError: Always, on rank 0; it aborts the job.
        """
        endings.give_up(self._position, self._checkpoint, left, size, self._least)
