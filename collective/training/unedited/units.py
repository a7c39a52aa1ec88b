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

A removal of a file is a unit as well, though some ranks pass it by (``ScriptJob.remove``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import Elastic
from collective.elastic.preemption import LEAVES, WAITING, Preemption
from collective.errors import CollectiveError, LeaveJob
from collective.training import keras_compat
from collective.training.observers.elastic.membership import Change
from collective.training.partition.undo import whole_or_absent
from collective.training.process.interrupts import Agreement
from collective.training.process.object_collectives import broadcast_object, gather_few
from collective.training.steps.batch_function import BatchFunction, StepObserver
from collective.training.steps.leaves import Leaves
from collective.training.steps.program import Program
from collective.training.unedited import ranks_left
from collective.training.unedited.growth import Growth
from collective.training.unedited.portable import opened, portable
from collective.training.unedited.resume import StateFolder

T = TypeVar("T")
# After so many steps ranks ask each other about Ctrl-C, where a step has no sum with which
# the answer could travel: in predict.
_STEPS_UNHEARD = 16


@dataclasses.dataclass
class _Ended:
    """The last unit that this rank has ended.

    Attributes:
        result: What it gave.
        variables: Those that a step uses; none of another unit.
        what: Names it.
        is_removal: Whether it was a removal of a file.
        before: By the id of a variable: its value before it was assigned since.
    """

    result: Any = None
    variables: Sequence[tf.Variable] = ()
    what: str = ""
    is_removal: bool = False
    before: dict[int, Any] = dataclasses.field(default_factory=dict)


class Removal(enum.Enum):
    """The state of a removal that the death of a rank has interrupted."""

    REPEATED = enum.auto()  # no rank has ended it
    DONE = enum.auto()
    OWN = enum.auto()  # rank 0 does not make it


class Units(StepObserver):
    """Runs the units of a rank, again after ranks have died.

    Args:
        folder: Where states of the script are kept. If None, none is.

    Attributes:
        on_change: Called after each change of the ranks.
        growth: Records units, or answers them from a record.
    """

    def __init__(self, backend: Backend, folder: StateFolder | None = None):
        self._folder = folder
        self.on_change: list[Callable[[], None]] = []
        self.interrupts = Agreement(backend)
        self._backend = backend
        self._count, self._ended = 0, _Ended()
        # What others have ended, and this rank begins later.
        self._early: _Ended | None = None
        self._elastic: Elastic | None = None
        self._step = 0
        self._contexts = contextlib.ExitStack()
        grows = backend.elastic and backend.options.max_np is not None
        self.growth = Growth(backend, grows or folder is not None)
        if isinstance(backend, Elastic) and backend.elastic:
            self._elastic = backend
            backend.on_change = self._changed
            with tf.device("CPU"):
                self._announced = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._flags = 0  # the value of that variable
            self._preemption = self._contexts.enter_context(Preemption())
            self._contexts.enter_context(
                keras_compat.model.before_assignments(self._note)
            )

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
        self._step = number
        if self._elastic is not None:
            self._announce()
        self.growth.pass_step(program.written)

        def attempt() -> Any:
            undone: Any = contextlib.nullcontext()
            if program.traffic.writes_early or not program.has_run:
                both = [*program.variables, *program.own_variables]
                undone = whole_or_absent(both)
            with undone:
                result = program(batch.tensors, number)
            return result, program.attached[-1]

        is_replayed = self.growth.is_new
        name = f"a step of {getattr(function, 'name', '')}"
        (result, said), is_own = self._run(attempt, program.variables, "", name)
        if not is_own:  # others have made the step: nothing of it is left over here
            for variable in program.own_variables:
                variable.assign(tf.zeros_like(variable))
        self._step = number + 1
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

    def _announce(self) -> None:
        """Say in the next step whether this rank leaves, or another one waits."""
        flags = self._preemption.flags() & (LEAVES | WAITING)
        if flags != self._flags:
            self._flags = flags
            self._announced.assign(flags)

    def end_eager_step(self) -> None:
        """Wait for the other ranks after a step that has used no collectives.

        So they hear of Ctrl-C together; and in an elastic job, a rank that was asked to
        leave does so.
        """
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
            if self.growth.replays:
                result = self.growth.answer(name)
                self._end(_Ended(result, variables, name))
                self._catch_up()
                return result, False
            self.growth.forget_replay()
            try:
                result = attempt()
                self._end(_Ended(result, variables, name))
                return result, True
            except Exception as error:
                elastic = self._elastic
                if elastic is None or not elastic.is_repeated(error):
                    raise
            self._regroup(variables, what)
            if self._early is not None and self._early.is_removal:
                self._early = None  # others have passed it before this unit

    def _end(self, ended: _Ended) -> None:
        self._count += 1
        self._ended = ended
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

    def _regroup(
        self, variables: Sequence[tf.Variable], what: str, left: Sequence[int] = ()
    ) -> None:
        """Form the job again; take what others have ended and this rank has not."""
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

    def _agree(
        self, variables: Sequence[tf.Variable], what: str, change: Change
    ) -> None:
        backend = self._backend
        mine = -1 if self.growth.is_new else self._count
        counts = gather_few(backend, [mine])[:, 0]
        self._check_size(change.size, backend.size)
        ahead, is_new = int(counts.argmax()), counts < 0
        behind = ~is_new & (counts < counts.max())
        if behind.any():
            ended = self._handed_on(variables, ahead, bool(behind[backend.rank]))
            if behind[backend.rank]:
                self._end(ended)
                self._early = ended
        if is_new.any():
            self.growth.give_record(ahead)
            if not is_new[backend.rank]:
                self.growth.give_variables()  # waits until each newcomer stands here
        if backend.rank == 0:
            if what:
                ranks_left.print_repeated(change.size, backend.size, what)
            else:
                change.print(self._step)

    def _handed_on(
        self, variables: Sequence[tf.Variable], root: int, is_behind: bool
    ) -> _Ended:
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
        return _Ended(opened(result), used, what, is_removal)

    @staticmethod
    def _value(variable: tf.Variable, before: Mapping[int, Any]) -> np.ndarray:
        value = before.get(id(variable))
        return np.asarray(variable.read_value() if value is None else value)

    def _check_size(self, before: int, size: int) -> None:
        """End the job if too few ranks are left."""
        ranks_left.check(
            self._backend, self._step, before, size, self._folder is not None
        )

    def announcement(self) -> list[tf.Tensor]:
        """Return what this rank adds to the first sum of each step, while it is traced."""
        said = self.interrupts.attached()
        if self._elastic is None:
            return said
        backend, mine = self._backend, tf.cast(self._announced.read_value(), tf.float32)
        return [tf.one_hot(backend.replica(), backend.most_replicas) * mine, *said]

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
            self._end(_Ended(is_removal=True))

    def interrupted_removal(self, error: Exception) -> Removal:
        """After the death of ranks in a removal, continue with those that are left.

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
