"""What the ranks of an elastic job (``--min-np``) do together, one unit after the other.

A unit is a step, a save, a comparison: it ends on a rank only when every rank has taken
part. So when a rank dies, those that are left are in the same unit, or some are in it and
some have just ended it. The former get what it gave from one of the latter; then all make
the unit that they are in, again or for the first time. No loop has to know: a step is
repeated with the batch that every rank holds, and Keras' loop continues.

An attempt of a unit exchanges values and returns them, the same on every rank: what they
change is changed after the unit, since a rank that is behind gets the result alone. A step
writes variables: such a rank gets their values right after the step, too, though the other
rank may have assigned some since. Those it has kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import Elastic
from collective.elastic.preemption import Preemption
from collective.errors import CollectiveError
from collective.training import keras_compat
from collective.training.observers.elastic.change import Change
from collective.training.partition.undo import whole_or_absent
from collective.training.process.object_collectives import broadcast_object, gather_few
from collective.training.process.portable import opened, portable
from collective.training.steps.batch_function import StepObserver
from collective.training.steps.leaves import Leaves
from collective.training.steps.program import Program


@dataclasses.dataclass
class Ended:
    """The last unit that this rank has ended.

    Attributes:
        result: What it gave.
        variables: Those that a step uses; none of another unit.
        what: Names it.
        is_removal: Whether it was a removal of a file, which some ranks pass by.
        before: By the id of a variable: its value before it was assigned since.
    """

    result: Any = None
    variables: Sequence[tf.Variable] = ()
    what: str = ""
    is_removal: bool = False
    before: dict[int, Any] = dataclasses.field(default_factory=dict)


class Units(StepObserver):
    """Runs the units of a rank, again after ranks have died.

    A subclass says how many ranks are enough, and what becomes of ranks that join.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._count, self._ended = 0, Ended()
        # What others have ended, and this rank begins later.
        self._early: Ended | None = None
        self._elastic: Elastic | None = None
        self._contexts = contextlib.ExitStack()
        if isinstance(backend, Elastic) and backend.elastic:
            self._elastic = backend
            with tf.device("CPU"):
                self._announced = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._flags = 0  # the value of that variable
            self._preemption = Preemption()

    def _enter(self, hears: bool = True) -> None:
        """Begin to look at what happens between steps, until ``_contexts`` are closed.

        Args:
            hears: Whether SIGTERM asks this rank to leave.
        """
        self._preemption = Preemption()
        if hears:
            self._contexts.enter_context(self._preemption)
        self._contexts.enter_context(keras_compat.model.before_assignments(self._note))

    def _note(self, variable: Any) -> None:
        """Keep the value of a variable that is assigned between two steps."""
        if tf.executing_eagerly():
            found = keras_compat.model.tf_variable(variable)
            self._ended.before.setdefault(id(found), tf.identity(found))

    def before_overrun(self, program: Program) -> None:
        """Keep the values of the variables that a graph writes between two steps."""
        if self._elastic is not None:
            for variable in program.variables:
                self._note(variable)

    def _announce(self, kinds: int) -> None:
        """Say in the next step what becomes of this rank, or who waits.

        Args:
            kinds: The sum of the flags of ``Preemption`` that are said.
        """
        flags = self._preemption.flags() & kinds
        if flags != self._flags:
            self._flags = flags
            self._announced.assign(flags)

    def announcement(self) -> list[tf.Tensor]:
        """Return what this rank adds to the first sum of each step, while it is traced."""
        if self._elastic is None:
            return []
        backend, mine = self._backend, tf.cast(self._announced.read_value(), tf.float32)
        return [tf.one_hot(backend.replica(), backend.most_replicas) * mine]

    def _step(
        self, program: Program, batch: Leaves, number: int, what: str
    ) -> tuple[Any, Any, bool]:
        """Run a step as a unit.

        Args:
            what: Names it in a record.

        Returns:
            What it returns, the last sum of what was attached to it, and whether this rank
            itself has ended it.
        """

        def attempt() -> Any:
            undone: Any = contextlib.nullcontext()
            if program.traffic.writes_early or not program.has_run:
                both = [*program.variables, *program.own_variables]
                undone = whole_or_absent(both)
            with undone:
                result = program(batch.now(), number)
            return result, program.attached[-1], program.report

        found, is_own = self._run(attempt, program.variables, "", what)
        result, said, report = found
        if not is_own:  # others have made the step: nothing of it is left over here
            program.report = report
            for variable in program.own_variables:
                variable.assign(tf.zeros_like(variable))
        return result, said, is_own

    def _run(
        self,
        attempt: Callable[[], Any],
        variables: Sequence[tf.Variable],
        what: str,
        name: str,
    ) -> tuple[Any, bool]:
        """Return the result of a unit, and whether this rank itself has ended it.

        Args:
            what: Names it when it is repeated.
            name: Names it in the record.
        """
        while True:
            early, self._early = self._early, None
            if early is not None:
                return early.result, False
            answer = self._answer(variables, name)
            if answer is not None:
                return answer.result, False
            try:
                result = attempt()
                self._end(Ended(result, variables, name))
                return result, True
            except Exception as error:
                elastic = self._elastic
                if elastic is None or not elastic.is_repeated(error):
                    raise
            self._regroup(variables, what)
            if self._early is not None and self._early.is_removal:
                self._early = None  # others have passed it before this unit

    def _answer(self, variables: Sequence[tf.Variable], name: str) -> Ended | None:
        """Return what a unit has given before this rank came; None if it is made now."""
        return None

    def _end(self, ended: Ended) -> None:
        self._count += 1
        self._ended = ended

    def _regroup(
        self, variables: Sequence[tf.Variable], what: str, left: Sequence[int] = ()
    ) -> None:
        """Form the job again; take what others have ended and this rank has not.

        Args:
            variables: Those of the unit in which this rank is.
            what: Names it.
            left: Ranks that leave by themselves.
        """
        backend = self._elastic
        assert backend is not None
        noticed, size = time.perf_counter(), backend.size
        former: Sequence[int] = range(size)
        while True:
            former = [former[r] if r >= 0 else r for r in backend.regroup()]
            gone = [rank for rank in left if rank not in former]
            try:
                self._agree(variables, what, Change(former, size, noticed, gone))
                return
            except Exception as error:
                if not backend.lost(error):
                    raise

    @property
    def _is_new(self) -> bool:
        """Return whether this rank has not come yet to where the others are."""
        return False

    def _agree(
        self, variables: Sequence[tf.Variable], what: str, change: Change
    ) -> None:
        backend = self._backend
        counts = gather_few(backend, [-1 if self._is_new else self._count])[:, 0]
        self._check_size(change.size, backend.size)
        ahead, is_new = int(counts.argmax()), counts < 0
        behind = ~is_new & (counts < counts.max())
        if behind.any():
            ended = self._handed_on(variables, ahead, bool(behind[backend.rank]))
            if behind[backend.rank]:
                self._end(ended)
                self._early = ended
        if is_new.any():
            self._admit(ahead, int(counts.max()))
        self._changed_to(change, what, ahead)

    def _check_size(self, before: int, size: int) -> None:
        """Act if too few ranks are left."""

    def _admit(self, ahead: int, count: int) -> None:
        """Give ranks that have joined what the others have; every rank calls it.

        Args:
            ahead: A rank that has ended the last unit.
            count: How many units it has ended.
        """

    def _changed_to(self, change: Change, what: str, ahead: int) -> None:
        """Act once all ranks have the same, before the unit is made."""

    def _handed_on(
        self, variables: Sequence[tf.Variable], root: int, is_behind: bool
    ) -> Ended:
        """Give the ranks that are behind the last unit: its result, and its variables.

        Args:
            variables: Those of the unit in which this rank is, if it is behind.
        """
        backend, ended = self._backend, self._ended
        shapes = [(tuple(v.shape), v.dtype.name) for v in ended.variables]
        sent = portable(ended.result), ended.what, ended.is_removal, shapes
        result, what, is_removal, shapes = broadcast_object(backend, sent, root)
        written = variables if is_behind else ended.variables
        if len(written) != len(shapes) and (is_behind or backend.rank == root):
            raise CollectiveError(
                f"after the death of a rank, rank {backend.rank} is in another call than "
                f"rank {root}",
                hint="every rank must make the same calls of Keras",
                everywhere=False,
            )
        values = []
        for index, (shape, dtype) in enumerate(shapes):
            if backend.rank == root:
                mine = self._value(written[index], ended.before)
            else:
                mine = np.empty(shape, tf.as_dtype(dtype).as_numpy_dtype)
            values.append(backend.broadcast_array(mine, root))
        if is_behind:  # all of them, or none if the root dies meanwhile
            for variable, value in zip(written, values, strict=True):
                variable.assign(value)
        used = written if is_behind else ()
        return Ended(opened(result), used, what, is_removal)

    @staticmethod
    def _value(variable: tf.Variable, before: Mapping[int, Any]) -> np.ndarray:
        value = before.get(id(variable))
        return np.asarray(variable.read_value() if value is None else value)
