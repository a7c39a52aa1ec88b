"""What the ranks of an unedited script do together; see ``observers/elastic/units.py``.

A removal of a file is a unit as well, though some ranks pass it by (``ScriptJob.remove``).
"""

from __future__ import annotations

import contextlib
import enum
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.elastic.preemption import LEAVES, WAITING
from collective.errors import CollectiveError, LeaveJob
from collective.training.observers.elastic.change import Change
from collective.training.observers.elastic.units import Ended, Units
from collective.training.process.interrupts import Agreement
from collective.training.process.object_collectives import gather_few
from collective.training.steps.batch_function import BatchFunction
from collective.training.steps.leaves import Leaves
from collective.training.steps.program import Program
from collective.training.unedited import ranks_left
from collective.training.unedited.growth import Growth
from collective.training.unedited.resume import StateFolder

T = TypeVar("T")
# After so many steps ranks ask each other about Ctrl-C, where a step has no sum with which
# the answer could travel: in predict.
_STEPS_UNHEARD = 16


class Removal(enum.Enum):
    """The state of a removal that the death of a rank has interrupted."""

    REPEATED = enum.auto()  # no rank has ended it
    DONE = enum.auto()
    OWN = enum.auto()  # rank 0 does not make it


class ScriptUnits(Units):
    """Runs the units of a script on a rank, again after ranks have died.

    Args:
        folder: Where states of the script are kept. If None, none is.

    Attributes:
        on_change: Called after each change of the ranks.
        growth: Records units, or answers them from a record.
    """

    def __init__(self, backend: Backend, folder: StateFolder | None = None):
        super().__init__(backend)
        self._folder = folder
        self.on_change: list[Callable[[], None]] = []
        self.interrupts = Agreement(backend)
        self._step_number = 0
        grows = backend.elastic and backend.options.max_np is not None
        self.growth = Growth(backend, grows or folder is not None)
        if self._elastic is not None:
            self._elastic.on_change = self._changed
            self._enter()

    def close(self) -> None:
        """End the repetition of units."""
        if self._elastic is not None:
            self._elastic.on_change = None
            self._elastic = None
        self._contexts.close()

    @property
    def are_kept(self) -> bool:
        """Return whether units are repeated or recorded; else they are plain calls."""
        return self._elastic is not None or self._folder is not None

    def resume(self) -> None:
        """Continue from the newest state in the folder, if there is one.

        Raises:
            UsageError: The folder cannot be used, or has the state of another script.
        """
        if self._folder is not None:
            saved = self._folder.opened(self._backend)
            if saved is not None:
                self.growth.resume(saved)

    def _save(self) -> None:
        """Write a state of the script."""
        folder = self._folder
        if folder is not None and self._backend.rank == 0 and not self.growth.is_new:
            saved = self.growth.state(folder.script)
            if saved is not None:
                folder.write(saved)

    def _changed(self) -> None:
        for action in self.on_change:
            action()

    def run(self, attempt: Callable[[], T], what: str = "", *_: Any) -> T:
        """Run a unit until every rank that is left has its result.

        Args:
            attempt: Uses collectives; returns the same on every rank, or nothing.
            what: Names it when it is repeated.

        Raises:
            CollectiveError: Too few ranks are left. The job ends.
        """
        if not self.are_kept:
            return attempt()
        sys.stdout.flush()  # what rank 0 has printed outlives it
        result: T = self._run(attempt, (), what, what)[0]
        return result

    def run_step(
        self,
        function: BatchFunction,
        program: Program,
        batch: Leaves,
        number: int,
    ) -> Any:
        """Run a step as a unit; after it ranks leave that were asked to, and others join."""
        self.interrupts.say()
        if not self.are_kept:
            result = program(batch.tensors, number)
            self.interrupts.reached |= self.interrupts.heard(program.attached)
            if not program.attached and number % _STEPS_UNHEARD == _STEPS_UNHEARD - 1:
                self.ask_for_interrupts()
            return result
        self._step_number = number
        if self._elastic is not None:
            self._announce(LEAVES | WAITING)
        self.growth.pass_step(program.written)
        is_replayed = self.growth.is_new
        name = f"a step of {getattr(function, 'name', '')}"
        result, said, is_own = self._step(program, batch, number, name)
        self._step_number = number + 1
        if is_own and self._elastic is not None:  # else it counts for the ranks before
            self._let_go(program.attached)
        if not is_replayed:
            self.interrupts.reached |= self.interrupts.heard([said])
        if self._folder is not None and self._folder.is_due:
            self._save()
        return result

    def ask_for_interrupts(self) -> None:
        """Ask all ranks whether one of them has heard Ctrl-C."""
        is_replayed = self.growth.is_new  # what was heard then ended another run
        self.interrupts.ask(self.run)
        if is_replayed:
            self.interrupts.reached = False

    @contextlib.contextmanager
    def eager_step(self) -> Iterator[None]:
        """Surround a step that uses no collectives: wait for the other ranks after it.

        So they hear of Ctrl-C together; and in an elastic job, a rank that was asked to
        leave does so.
        """
        yield
        self.growth.check_replayed(
            "a model runs eagerly, so its steps cannot be answered"
        )
        self.ask_for_interrupts()
        if self._elastic is None:
            return

        def attempt() -> np.ndarray:
            mine = self._preemption.flags() & (LEAVES | WAITING)
            return gather_few(self._backend, [mine])[:, 0]

        announced, is_own = self._run(attempt, (), "", "a step")
        if is_own:
            self._let_go([announced])

    def _answer(self, variables: Sequence[tf.Variable], name: str) -> Ended | None:
        if not self.growth.replays:
            self.growth.forget_replay()
            return None
        ended = Ended(self.growth.answer(name), variables, name)
        self._end(ended)
        self._catch_up()
        return ended

    def _end(self, ended: Ended) -> None:
        super()._end(ended)
        self.growth.note(ended.result, ended.what, ended.variables, ended.is_removal)

    def join(self, former: Sequence[int]) -> None:
        """Begin as a rank that the others have admitted.

        Args:
            former: What ``Elastic.enter`` has returned.
        """
        assert self._elastic is not None
        self.growth.begin()
        try:
            self._agree((), "", Change(former, len(former), time.perf_counter()))
        except Exception as error:
            if not self._elastic.lost(error):
                raise
            self._regroup((), "")

    @contextlib.contextmanager
    def keeping(self, callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
        """Inside, a newcomer gets the weights that callbacks keep on the other ranks."""
        kind = keras.callbacks.EarlyStopping
        before = self.growth.keepers
        self.growth.keepers = [c for c in callbacks if isinstance(c, kind)]
        try:
            yield
        finally:
            self.growth.keepers = before

    def _catch_up(self) -> None:
        """Take the variables of the others, if this newcomer stands where they are."""
        while self.growth.is_due:
            try:
                if not self.growth.take_saved():
                    self.growth.give_variables()
            except Exception as error:
                if self._elastic is None or not self._elastic.is_repeated(error):
                    raise
                self._regroup((), "")
            else:
                self._count = self.growth.count
                self._ended.before.clear()

    @property
    def _is_new(self) -> bool:
        return self.growth.is_new

    def _admit(self, ahead: int, count: int) -> None:
        self.growth.give_record(ahead)
        if not self.growth.is_new:
            self.growth.give_variables()  # waits until each newcomer stands here

    def _changed_to(self, change: Change, what: str, ahead: int) -> None:
        if self._backend.rank:
            return
        if what:
            ranks_left.print_repeated(change.size, self._backend.size, what)
        else:
            change.print(self._step_number)

    def _check_size(self, before: int, size: int) -> None:
        """End the job if too few ranks are left."""
        is_kept = self._folder is not None
        ranks_left.check(self._backend, self._step_number, before, size, is_kept)

    def announcement(self) -> list[tf.Tensor]:
        """Return what this rank adds to the first sum of each step, while it is traced."""
        return [*super().announcement(), *self.interrupts.attached()]

    def _let_go(self, announced: Sequence[tf.Tensor]) -> None:
        """Leave the job, or continue without ranks that leave and with ranks that wait.

        Raises:
            LeaveJob: This rank leaves.
        """
        assert self._elastic is not None
        flags = np.rint(np.asarray(announced[0])).astype(np.int64)
        leaving = np.flatnonzero(flags & LEAVES).tolist()
        if not leaving and not (flags & WAITING).any():
            return
        size = self._backend.size
        self._check_size(size, size - len(leaving))
        if self._backend.rank in leaving:
            self._elastic.leave()
            raise LeaveJob
        self._regroup((), "", leaving)

    def replayed_removal(self) -> Removal | None:
        """Return what a newcomer does with a removal; None if it is made by all ranks."""
        if self.growth.takes_removal():
            return Removal.DONE
        return Removal.OWN if self.growth.is_new else None

    def passed_removal(self) -> None:
        """Note that rank 0 has removed a file, and that every rank has seen it."""
        if self.are_kept:
            self._end(Ended(is_removal=True))

    def interrupted_removal(self, error: Exception) -> Removal:
        """Continue with the ranks that are left after others died in a removal.

        Args:
            error: What a collective has raised.

        Raises:
            Exception: The error, if no rank has died.
        """
        if self._elastic is None or not self._elastic.is_repeated(error):
            raise error
        self._regroup((), "a removal of a file")
        if self._early is None:
            return Removal.REPEATED
        if not self._early.is_removal:
            return Removal.OWN
        self._early = None
        return Removal.DONE

    def end_script(self) -> None:
        """Wait for the other ranks at the end of the script.

        Raises:
            CollectiveError: On every rank: rank 0 has died since its last unit. What it
                would have printed and written since is lost.
        """
        self._save()
        if self._elastic is None:
            return
        follows = [int(self._backend.rank > 0)]

        def gather() -> list[list[int]]:
            return gather_few(self._backend, follows).tolist()

        if self.run(gather, "the end of the script")[0] == [1]:  # of who is rank 0 now
            raise CollectiveError(
                "rank 0 died at the end of the script, after the last call that all "
                "ranks make together: what it had not printed or written is lost",
                hint="run the script again, from what it has saved",
            )
