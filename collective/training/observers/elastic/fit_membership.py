"""Ranks of a training under Keras' own ``fit`` that leave or join it between two steps.

Deaths are the business of ``FitUnits``. Ranks that leave or wait to join are announced in
the sum of each step, so every rank knows of them at the end of the same step. A rank that
joins gets the state then, and reads its data over to the position, as a training does that
is resumed; the others wait for it in their next unit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from collective.backends.capabilities import Elastic
from collective.elastic import generations
from collective.elastic.preemption import LEAVES, RESTARTS, WAITING
from collective.errors import (
    CollectiveError,
    JoinRejected,
    LeaveJob,
    NextGeneration,
    UsageError,
)
from collective.running_time import Deadline
from collective.training.loop.observed_fit import ObservedFit
from collective.training.loop.observer import FinishedStep, Observer
from collective.training.loop.state import newest
from collective.training.observers.checkpoint.schedule import Checkpoint
from collective.training.observers.elastic import membership
from collective.training.observers.elastic.fit_units import FitUnits
from collective.training.observers.elastic.state_handoff import StateHandoff
from collective.training.process.object_collectives import gather_few
from collective.training.verification.ranks import compare_newcomers


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
        change = membership.join(self._backend)
        self._units.join(change.former, change.noticed)
        generations.wait_for_previous()

    def admit(self, is_new: bool) -> None:
        """Give ranks that join the state of the others; every rank calls it."""
        position, backend = self._position, self._backend
        mine = position.fresh() if is_new else position.latest()
        try:
            compare_newcomers(backend, self.description)
            state, _ = newest(mine, backend)
            if is_new:
                position.start = state
                self._observed.take_over()
        except UsageError as error:
            if not is_new:
                raise
            print(f"rank {backend.rank}: error: {error}", file=sys.stderr)
            backend.close()
            raise JoinRejected(error.exit_code) from None
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
        backend = self._backend
        if backend.rank == 0:
            print(
                f"collective: too few ranks to continue: {backend.size}, and --min-np "
                f"is {self._least}; waiting {membership.WAIT_SECONDS:.0f} s for others "
                "to join",
                file=sys.stderr,
                flush=True,
            )
        deadline = Deadline(membership.WAIT_SECONDS)
        while True:
            flags = self._units.preemption_flags
            gives_up = bool(flags & LEAVES) or deadline.passed()
            mine = flags & (WAITING | RESTARTS)
            found, gives_up = backend.broadcast_array(np.array([mine, gives_up]))
            if found & RESTARTS:
                self._begin_next_generation()
            if found & WAITING:
                return True
            if gives_up:
                self.give_up(*self._units.gone)
            time.sleep(membership.POLL_SECONDS)

    def _begin_next_generation(self) -> bool:
        """Keep the state and end every rank; return False if no host can keep it."""
        if not self._handoff.possible:
            return False
        if self._checkpoint is not None:
            self._checkpoint.wait()  # Keras writes one file of a model at a time
        if gather_few(self._backend, [self._handoff.keep()]).any():
            raise NextGeneration(generations.EXIT_CODE)
        self._handoff.possible = False  # the job continues as it is
        return False

    def give_up(self, left: int, size: int) -> None:
        """End the job, with a checkpoint if the user asked for checkpoints.

        Raises:
            CollectiveError: Always, on rank 0; it aborts the job.
        """
        position = self._position
        if self._backend.rank:
            self._backend.barrier()  # rank 0 ends the job
        if self._checkpoint is not None:
            self._checkpoint.save_last(position.start or position.take())
            hint = f"--resume continues from {self._checkpoint.folder}, on fewer ranks, too"
        else:
            hint = "--checkpoint-dir, to continue from there"
            hint = f"a smaller --min-np; and {hint}" if left else hint
        raise CollectiveError(
            f"step {position.step}: of {size} ranks {left} "
            f"{'is' if left == 1 else 'are'} left, and --min-np is {self._least}",
            hint=hint,
            everywhere=False,
        )
