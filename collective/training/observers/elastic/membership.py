"""Trains while ranks die, leave or join: repeats the loop, from the newest state.

The update comes after the all-reduce, so every rank holds the state after the last step
that it has finished, and some may have finished one step more than others when a rank
dies. The newest state wins: no step that any rank has finished is made twice. Ranks that
leave or wait to join are announced in the step's all-reduce, so every rank knows of them
at the end of the same step, and the job is reconfigured before the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from collective.backends.base import Backend
from collective.backends.capabilities import Elastic
from collective.elastic import generations
from collective.errors import (
    CollectiveError,
    LeaveJob,
    NextGeneration,
)
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Input
from collective.training.loop.callbacks import CallbackMethods
from collective.training.loop.loop import Loop
from collective.training.loop.observer import FinishedStep, Observer, methods
from collective.training.loop.position import Position
from collective.training.loop.state import broadcast, newest
from collective.training.observers.checkpoint.schedule import Checkpoint
from collective.training.observers.elastic import endings
from collective.training.observers.elastic.change import Change
from collective.training.observers.elastic.control_messages import ControlMessages
from collective.training.observers.elastic.fit_units import units_of
from collective.training.observers.elastic.state_handoff import StateHandoff
from collective.training.process.object_collectives import gather_few
from collective.training.process.random_state import RandomState
from collective.training.verification.ranks import compare_newcomers, describe_training

T = TypeVar("T")
_TRAINS, _STARTS = range(2)
_has_joined = False  # whether this process has joined a job, in a training


class _StartAgain(Exception):
    """Ranks have died before every rank had begun to train, so the start is repeated."""

    def __init__(self, change: Change):
        super().__init__("the ranks start again")
        self.change = change


class Reconfigure(Exception):
    """All ranks have agreed to form the job again, without those that leave."""

    def __init__(self, leaving: Sequence[int] = ()):
        super().__init__("all ranks form the job again")
        self.leaving = leaving


@dataclass
class Start:
    """The start of a training, before its first step.

    Attributes:
        contexts: They are left when the training ends, or is started again.
        change: The change after which the training is repeated, or None at first.
        over: Whether the start is over, so that ``Membership`` handles deaths.
    """

    contexts: contextlib.ExitStack
    change: Change | None = None
    over: bool = False


def repeat_start(backend: Backend, model: Any, attempt: Callable[[Start], T]) -> T:
    """Start a training and make it; repeat the start if ranks die in it.

    A rank may notice a death when it has begun to train while others still start. So after
    each change all ranks first exchange whether any of them has to start again.
    """
    before, change = RandomState(model), None
    while True:
        check_trainings(backend)
        with contextlib.ExitStack() as contexts:
            start = Start(contexts, change)
            try:
                return attempt(start)
            except _StartAgain as again:
                change, size = again.change, 0
            except Exception as error:
                if start.over or not isinstance(backend, Elastic):
                    raise
                if not (backend.elastic and backend.caused_by_loss(error)):
                    raise
                noticed, size = time.perf_counter(), backend.size
        if size:
            change = _agree_to_start(backend, Change((), size, noticed))
        before.put()


def check_trainings(backend: Backend) -> None:
    """Refuse a further training of ranks that joined in another one, and are left alone.

    Their scripts have made fewer trainings than those of the ranks that began the job.
    """
    if _has_joined and backend.rank == 0:
        raise CollectiveError(
            "the ranks that began the job have ended, and this one joined them in an "
            "earlier training: its script would repeat trainings that they have made",
            hint="one collective.fit for all epochs in a job that grows (--max-np)",
            everywhere=False,
        )


def _agree_to_start(backend: Backend, change: Change) -> Change:
    """Tell the remaining ranks to start again, and return how they have changed."""
    assert isinstance(backend, Elastic)
    while True:
        change = dataclasses.replace(change, former=backend.regroup())
        try:
            gather_few(backend, [_STARTS])
            return change
        except Exception as error:
            if not backend.lost(error):
                raise
            change = Change((), backend.size, time.perf_counter())


class Membership(Observer):
    """Reconfigures the job between two steps, and repeats the loop.

    Args:
        plan: The settings from which the batches are made.
        checkpoint: It gets a last state when too few ranks are left.
        settings: Further settings that joining ranks must have in common, by name.
    """

    def __init__(
        self,
        position: Position,
        inputs: Input | Batches,
        plan: Mapping[str, Any],
        checkpoint: Checkpoint | None,
        settings: Mapping[str, str],
    ):
        self.position = position
        self.backend: Backend = position.backend
        self.checkpoint = checkpoint
        # It is described before the training changes anything of the model.
        self.description = describe_training(inputs, position.model) | dict(settings)
        self.handoff = StateHandoff(position, plan)
        self.messages = ControlMessages(self.backend)
        self.attachments = [self.messages]
        options = self.backend.options
        self.least, self.grows = options.min_np or 1, options.max_np is not None

    def run(self, loop: Loop, start: Start) -> None:
        """Run ``loop.run``, and repeat it after each change of the ranks.

        Raises:
            ProcessExit: This rank leaves, or the job's next generation begins.
            CollectiveError: Fewer than ``min_np`` ranks are left.
        """
        self.loop, self.start = loop, start
        change = join(self.backend) if self.backend.joins else None
        generations.wait_for_previous(loop.step.trace)
        if change is None:
            self._find_start()
        start.over = True
        try:
            with self.messages.preemption, contextlib.closing(loop):
                repeat_on_change(self.backend, self._attempt, change)
        except NextGeneration:
            generations.report_handed_over()
            raise

    def _find_start(self) -> None:
        """Read the state to start from, if there is one."""
        self.handoff.find()
        if self.checkpoint is not None:
            self.checkpoint.find_start()

    def repeat(self, action: Callable[[], T]) -> T:
        """Run an action after the training, and repeat it if a rank dies during it.

        The remaining ranks first agree on the end of the training again, because the rank
        that died may have been the only one that had finished the last step.
        """

        def attempt(change: Change | None) -> T:
            if change is not None:
                with contextlib.closing(self.loop):
                    self._attempt(change)
            with units_of(self.backend).as_one():
                return action()

        return repeat_on_change(self.backend, attempt)

    def _attempt(self, change: Change | None) -> None:
        """Train from the state that all ranks agree on, to the end."""
        if change is None:
            self._begin()
        else:
            self._continue(change)
        self.loop.train()

    def _begin(self) -> None:
        position = self.position
        if self.start.change is not None:
            self._accept(self.start.change)
        if self.backend.size > 1 and not position.agree_on_start():
            # Rank 0's model arrives whole or not at all: if rank 0 dies now, the model of
            # another rank must still be its own.
            broadcast(position.fresh(), self.backend).put(position.model)
        self.handoff.taken()
        self.loop.begin()

    def _continue(self, change: Change) -> None:
        """Continue with the newest state, if enough ranks are left."""
        backend, position, loop = self.backend, self.position, self.loop
        joined = change.former[backend.rank] < 0
        if gather_few(backend, [_TRAINS]).any():
            raise _StartAgain(change)
        with endings.rejecting(backend, joined):
            if change.joined:
                compare_newcomers(backend, self.description)
            position.start, root = newest(position.latest(), backend)
            loop.begin(root)
        self._accept(change)

    def _accept(self, change: Change) -> None:
        """Continue if enough ranks are left, or if no work is left to do."""
        backend, position = self.backend, self.position
        finished = position.epoch >= self.loop.epochs
        if backend.rank == 0 and (finished or self._enough or self.grows):
            change.print(position.step)
        if not (finished or self._enough):
            if self.grows:
                self._wait_for_ranks()
            self._give_up(backend.size, change.size)

    @property
    def _enough(self) -> bool:
        return self.backend.size >= self.least

    def _wait_for_ranks(self) -> None:
        """Wait for ranks, and return if no rank joins in time.

        Raises:
            Reconfigure: Ranks wait to join.
            NextGeneration: The launcher has found other hosts.
        """
        flags = self.messages.preemption.flags
        restart = self._begin_next_generation
        if endings.wait_for_ranks(self.backend, self.least, flags, restart):
            raise Reconfigure

    def after_step(self, step: FinishedStep) -> None:
        """Act on the messages of the step.

        Raises:
            Reconfigure: Ranks leave, or wait to join; raised on all that stay.
            LeaveJob: This rank leaves.
            NextGeneration: The launcher asks for the job's next generation.
        """
        position, backend = self.position, self.backend
        if position.step >= self.loop.last_step or position.stopped:
            return
        received = self.messages
        if received.next_generation:
            self._begin_next_generation()
        if not (received.leaving or received.waiting):
            return
        stay = backend.size - len(received.leaving)
        if stay < self.least and not (stay and self.grows):
            self._give_up(stay, backend.size)
        if backend.rank not in received.leaving:
            raise Reconfigure(received.leaving)
        for leaving in methods(self.loop.observers, "leaving"):
            leaving()
        self.loop.close()  # before another rank takes over the files
        assert isinstance(backend, Elastic)
        backend.leave()
        raise LeaveJob

    def _begin_next_generation(self) -> None:
        """Keep the state and end every rank; return if no host can keep it."""
        endings.begin_next_generation(self.backend, self.handoff, self.checkpoint)

    def _give_up(self, left: int, size: int) -> None:
        """End the job, with a checkpoint if the user asked for checkpoints.

        Raises:
            CollectiveError: Always, on rank 0; it aborts the job.
        """
        endings.give_up(self.position, self.checkpoint, left, size, self.least)


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


def join(backend: Backend) -> Change:
    """Join the running job, without any of its state yet."""
    global _has_joined
    assert isinstance(backend, Elastic)
    former = backend.enter()
    _has_joined = True
    return Change(former, len(former), time.perf_counter())


def repeat_on_change(
    backend: Backend,
    attempt: Callable[[Change | None], T],
    change: Change | None = None,
) -> T:
    """Run an attempt of all ranks together, and repeat it after each change of the ranks.

    The attempt gets ``change`` at first (None at the start of a job), then each new change.
    """
    while True:
        left: Sequence[int] = ()
        try:
            return attempt(change)
        except Reconfigure as agreed:
            left = agreed.leaving
        except Exception as error:
            if not (isinstance(backend, Elastic) and backend.lost(error)):
                raise
        assert isinstance(backend, Elastic)
        noticed, size = time.perf_counter(), backend.size
        change = Change(backend.regroup(), size, noticed, left)
