"""What the ranks of an elastic job do together in ``collective.fit`` and its sisters.

Keras' own loops run, so a rank that joins can take part only where the others are between
two steps: there it has the state that they have. A regroup because of a death admits none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.elastic.preemption import LEAVES, RESTARTS, WAITING
from collective.training.observers.elastic.change import Change
from collective.training.observers.elastic.units import Ended, Units
from collective.training.process.object_collectives import gather_few
from collective.training.steps.batch_function import BatchFunction
from collective.training.steps.leaves import Leaves
from collective.training.steps.program import Program

_units: dict[Backend, FitUnits] = {}


class Training(Protocol):
    """What units ask of the training that runs."""

    @property
    def step(self) -> int:
        """Return the number of the next step."""
        ...

    @property
    def is_reading_over(self) -> bool:
        """Return whether this rank has joined, and reads what the others have read."""
        ...

    def admit(self, is_new: bool) -> None:
        """Give ranks that join the state of the others; every rank calls it."""
        ...

    def changed(self, root: int) -> None:
        """Act after a change of the ranks; every rank calls it. Collectives."""
        ...

    def continues_with(self, left: int) -> bool:
        """Return whether so many ranks are enough to go on."""
        ...

    def give_up(self, left: int, size: int) -> None:
        """End the job, of which too few ranks are left."""
        ...


class FitUnits(Units):
    """Runs the units of a rank; without an elastic job, they are plain calls.

    Attributes:
        training: The training that runs, once it can continue without some ranks.
        announced: By rank, what all ranks have said in the last training step; None if
            the ranks have changed since.
        gone: How many ranks the last change has left, and of how many.
    """

    def __init__(self, backend: Backend):
        super().__init__(backend)
        self.training: Training | None = None
        self.announced: np.ndarray | None = None
        self._depth = 0  # of units, of which those within another one are a part
        self._serves = self._trains = self._joins = False
        self.gone = backend.size, backend.size

    @contextlib.contextmanager
    def serving(self, trains: bool = False) -> Iterator[None]:
        """Surround a call in which units are made again after deaths.

        Args:
            trains: Whether it trains; ranks may then be asked to leave.
        """
        elastic = self._elastic
        if elastic is None or self._serves:
            yield
            return
        before = elastic.on_change
        elastic.on_change = before or _nothing  # so their caller gets losses
        self._serves, self._trains = True, trains
        self._enter(trains)
        try:
            yield
        finally:
            self._contexts.close()
            self._serves, self.training = False, None
            elastic.on_change = before

    def run(
        self, attempt: Callable[[], Any], variables: Sequence[tf.Variable] = ()
    ) -> Any:
        """Run a unit until every rank that is left has its result.

        Args:
            attempt: Uses collectives; returns the same on every rank.
            variables: Those that it has made equal on every rank.

        Returns:
            What it returned; None on a rank that has joined, and that is not yet where
            the others are.
        """
        if self._elastic is None or self._depth:
            return attempt()
        if self.training is not None and self.training.is_reading_over:
            return None

        def together() -> Any:
            with self.as_one():
                result = attempt()
                gather_few(self._backend, [1])  # a broadcast waits for nobody
                return result

        return self._run(together, variables, "", "")[0]

    def afterwards(self, action: Callable[[], Any]) -> Any:
        """Run an action after the training as one unit."""
        with self.serving():
            return self.run(action)

    @contextlib.contextmanager
    def as_one(self) -> Iterator[None]:
        """Inside, units are parts of what the caller repeats."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def run_step(
        self, function: BatchFunction, program: Program, batch: Leaves, number: int
    ) -> Any:
        """Run a step as a unit."""
        if self._elastic is None or self._depth:
            return program(batch.now(), number)
        self._announce(LEAVES | WAITING | RESTARTS)
        self.announced = None
        result, _, is_own = self._step(program, batch, number, "")
        if is_own and function.name == "train_step":
            self.announced = np.rint(program.attached[0]).astype(np.int64)
        return result

    def between_steps(self, action: Callable[[], bool]) -> None:
        """Run an action of all ranks after a step; form the job again if it says so.

        If a rank dies meanwhile, the action is given up: others may be on their way to it.

        Args:
            action: Uses collectives.
        """
        try:
            with self.as_one():
                changes = action()
        except Exception as error:
            if self._elastic is None or not self._elastic.is_repeated(error):
                raise
            self._regroup((), "")
            return
        if changes:
            self.change()

    def change(self, leaving: Sequence[int] = ()) -> None:
        """Form the job again between two steps, with those that wait to join.

        Args:
            leaving: Ranks that leave.
        """
        self._regroup((), "", leaving, admits=True)

    def preemption_flags(self) -> int:
        """Return what this rank knows of ranks that leave or wait."""
        return self._preemption.flags()

    def join(self, former: Sequence[int], noticed: float) -> None:
        """Begin as a rank that the others have admitted.

        Args:
            former: What ``Elastic.enter`` has returned.
            noticed: See ``Change``.
        """
        assert self._elastic is not None
        self._joins = True
        try:
            self._agree((), "", Change(former, len(former), noticed))
        except Exception as error:
            if not self._elastic.lost(error):
                raise
            self._regroup((), "")

    def _regroup(
        self,
        variables: Sequence[tf.Variable],
        what: str,
        left: Sequence[int] = (),
        admits: bool = False,
    ) -> None:
        assert self._elastic is not None
        self.announced, self._elastic.admits = None, admits
        try:
            super()._regroup(variables, what, left)
        finally:
            self._elastic.admits = True

    def _answer(self, variables: Sequence[tf.Variable], name: str) -> Ended | None:
        left, size = self.gone
        if self.training is not None and not self.training.continues_with(left):
            self.training.give_up(left, size)
        return None

    @property
    def _is_new(self) -> bool:
        return self._joins

    def _check_size(self, before: int, size: int) -> None:
        """Note how many are left; who is behind may not be where a training can end."""
        self.gone = size, before

    def _admit(self, ahead: int, count: int) -> None:
        assert self.training is not None
        with self.as_one():
            self.training.admit(self._joins)
        if self._joins:
            self._joins, self._count, self._ended = False, count, Ended()

    def _changed_to(self, change: Change, what: str, ahead: int) -> None:
        backend, training = self._backend, self.training
        mine = 0 if self._trains else -1  # no step, before it has begun
        mine = mine if training is None else training.step
        step = gather_few(backend, [mine])[ahead]
        if backend.rank == 0 and (
            training is None or training.continues_with(backend.size)
        ):
            change.print(None if step[0] < 0 else int(step[0]))
        if training is not None:
            with self.as_one():
                training.changed(ahead)


def units_of(backend: Backend) -> FitUnits:
    """Return the units of a backend, whose number goes on from call to call."""
    if not backend.elastic:
        return FitUnits(backend)
    if backend not in _units:
        _units[backend] = FitUnits(backend)
    return _units[backend]


def _nothing() -> None:
    """Do nothing after a change of the ranks."""
