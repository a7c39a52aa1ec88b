"""Ranks that join a job of an unedited script in its middle, and jobs that are resumed.

All ranks keep a record of what their units have returned. A newcomer is admitted after a
step; it gets the record and runs the script from its start, each unit answered from there,
while the others wait. When it stands where they are, it takes the variables that steps have
written, and is one of them.

A newcomer does not make the steps, so until then those variables have old values. If the
script, or a callback, reads one of them between two steps, it would continue with a value
that the other ranks never had. The newcomer then leaves, and says where.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend, end_process
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat import tensorflow_names
from collective.training.process.object_collectives import broadcast_object, gather_few
from collective.training.unedited import script
from collective.training.unedited.record import OtherUnit, Record, Replay
from collective.training.unedited.resume import Saved

# Methods of variables that read one to write it: it gets its value from the others.
_READ_TO_WRITE = "assign_add", "assign_sub"
_DEPTH = 40  # frames between such a method and the read, at most


class Growth:
    """The record of a rank, and the replay of one that has joined, or of all that resume.

    Args:
        records: Whether a rank may join, or the job be resumed.

    Attributes:
        is_new: Whether this rank has not come yet to where the record ends.
    """

    def __init__(self, backend: Backend, records: bool):
        self._backend = backend
        self._record: Record | None = Record() if records else None
        self._saved: Saved | None = None
        self._replay: Replay | None = None
        self._used: dict[int, tf.Variable] = {}  # by steps, in the order of the script
        self._stale: set[int] = set()  # of this newcomer: which have old values
        self._reading = contextlib.ExitStack()
        # Of the current call: callbacks that keep weights, which a newcomer is given.
        self.keepers: Sequence[keras.callbacks.EarlyStopping] = ()
        self._root = 0
        self.is_new = False

    def note(
        self,
        result: Any,
        what: str,
        variables: Sequence[tf.Variable],
        is_removal: bool = False,
    ) -> None:
        """Note a unit that has ended.

        Args:
            result: What it has returned, the same on every rank.
            what: Names it.
            variables: Those that it uses, if it is a step.
        """
        if self._record is None and not self.is_new:
            return  # nobody will ask
        for variable in variables:
            self._used.setdefault(id(variable), variable)
        if self._record is None or self.is_new:
            return
        if not self._record.add(result, what, is_removal):
            self._record = None

    def begin(self) -> None:
        """Begin as a newcomer, whose failures are no others' business."""
        vars(self._backend)["abort"] = self._leave_alone
        self._begin_replay()

    def resume(self, saved: Saved) -> None:
        """Begin as all ranks do that resume from a state."""
        self._saved, self._record = saved, saved.record
        self._replay = Replay(saved.record)
        self._begin_replay()
        if self._replay.is_over:
            self._end()

    def _begin_replay(self) -> None:
        self.is_new = True
        guard = tensorflow_names.before_reads(self._check_read)
        self._reading.enter_context(guard)
        self._reading.enter_context(keras_compat.model.logs_of_last_step())

    def _leave_alone(self, exit_code: int) -> NoReturn:
        """End this process, not the job; the launcher starts no other in its place."""
        self._backend.close()
        end_process(UsageError.exit_code)

    def give_record(self, root: int) -> None:
        """Give newcomers the record; every rank calls it.

        Args:
            root: A rank that is not new.
        """
        sent = None if self._record is None else (self._record,)
        found = broadcast_object(self._backend, sent, root)
        self._root = root
        if not self.is_new or self._replay is not None:
            return
        if found is None:
            self._refuse("the job has returned too much, or what cannot be sent, to a "
                         "script that begins now")  # fmt: skip
        (self._record,) = found
        self._replay = Replay(self._record)

    def state(self, script: str) -> Saved | None:
        """Return the state of this rank; None if it could not be recorded."""
        if self._record is None:
            return None
        used = [*self._used.values()]
        return Saved(
            script,
            self._record,
            _described(used),
            [np.asarray(v.read_value()) for v in used],
            [keeper.best_weights for keeper in self.keepers],
        )

    @property
    def count(self) -> int:
        """Return how many units the record has."""
        return 0 if self._record is None else len(self._record)

    def give_variables(self) -> None:
        """Give newcomers the variables, once each has replayed; every rank calls it."""
        backend, mine, root = self._backend, [*self._used.values()], self._root
        described = _described(mine)
        wanted = broadcast_object(backend, described, root)
        values = []
        for place, (shape, dtype) in enumerate(wanted):
            if backend.rank == root:
                own = np.asarray(mine[place].read_value())
            else:
                own = np.empty(shape, tf.as_dtype(dtype).as_numpy_dtype)
            values.append(backend.broadcast_array(own, root))
        kept = [keeper.best_weights for keeper in self.keepers]
        kept = broadcast_object(backend, kept, root)
        gather_few(backend, [1])  # every rank has them, or none goes on with them
        if self.is_new:
            self._take(wanted, values, kept)

    def take_saved(self) -> bool:
        """Take the variables of the state from which all ranks resume, if they do."""
        saved = self._saved
        if saved is None:
            return False
        self._take(saved.variables, saved.values, saved.kept)
        self._saved = None
        return True

    def _take(
        self, wanted: Any, values: Sequence[np.ndarray], kept: Sequence[Any]
    ) -> None:
        mine = [*self._used.values()]
        if wanted != _described(mine) or len(kept) != len(self.keepers):
            self._refuse("its steps use other variables than those of the record")
        for variable, value in zip(mine, values, strict=True):
            variable.assign(value)
        for keeper, weights in zip(self.keepers, kept, strict=True):
            keeper.best_weights = weights
        self._end()

    def _end(self) -> None:
        self.is_new = False
        self._reading.close()
        self._stale.clear()
        vars(self._backend).pop("abort", None)

    @property
    def is_due(self) -> bool:
        """Return whether this rank is new, and stands where the others are."""
        return self.is_new and self._replay is not None and self._replay.is_over

    @property
    def replays(self) -> bool:
        """Return whether the next unit is answered from the record."""
        return self.is_new and not self.is_due

    def forget_replay(self) -> None:
        """Forget removals of files that this rank has not made."""
        if not self.is_new:
            self._replay = None

    def answer(self, what: str) -> Any:
        """Return what the next unit has returned to the ranks that made it.

        Args:
            what: Names it.
        """
        assert self._replay is not None
        self._replay.skip_removals()
        try:
            return self._replay.result(what)
        except OtherUnit as error:
            self._refuse(f"{error}; a script must do the same whenever it is run")

    def pass_step(self, written: Sequence[tf.Variable]) -> None:
        """Pass a step that the others have made; what it writes has old values here."""
        if self.is_new:
            self._stale |= {id(variable) for variable in written}

    def takes_removal(self) -> bool:
        """Return whether others have made the removal that the script asks for now."""
        return self._replay is not None and self._replay.takes_removal()

    def check_replayed(self, why: str) -> None:
        """Refuse to join, or to resume, by a call of which the record has not all."""
        if self.is_new:
            self._refuse(why)

    def _check_read(self, variable: tf.Variable) -> None:
        """Refuse to go on with the value of a variable that steps have written."""
        if id(variable) not in self._stale or not tf.executing_eagerly():
            return
        where = _reader()
        if where:
            self._refuse(f"{where} reads {variable.name!r} between two steps")

    def _refuse(self, why: str) -> NoReturn:
        if self._saved is not None:
            raise UsageError(
                f"the script cannot be resumed: {why}",
                hint="keras.callbacks.BackupAndRestore in the script, which resumes after "
                "an epoch; or remove the folder of --resume",
            )
        print(
            f"a rank cannot join the job: {why}. The job continues as it is\n"
            "HINT: drop --max-np; or call collective.fit in the script "
            "(docs/how-to/elastic.md)",
            file=sys.stderr,
            flush=True,
        )
        self._leave_alone(UsageError.exit_code)


def _described(
    variables: Sequence[tf.Variable],
) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(v.shape), v.dtype.name) for v in variables]


def _reader() -> str:
    """Return the line that reads a variable, and that of the script; empty if we read."""
    passed = (*tensorflow_names.CODE, __file__, keras_compat.model.BACKEND)
    frames = traceback.extract_stack()
    if any(f.name in _READ_TO_WRITE for f in frames[-_DEPTH:]):
        return ""
    stack = [f for f in frames if not f.filename.startswith(passed)]
    if not stack or script.is_own(stack[-1].filename):
        return ""
    if any(_is_keeper(frame.filename) for frame in stack[-6:]):
        return ""
    nearest = stack[-1]
    where = f"{nearest.filename}:{nearest.lineno}"
    lines = [f for f in stack[:-1] if not script.is_library(f.filename)]
    return (
        f"{where}, called by {lines[-1].filename}:{lines[-1].lineno}"
        if lines
        else where
    )


def _is_keeper(file: str) -> bool:
    """Return whether code is that of a callback whose weights a newcomer is given."""
    return file == inspect.getfile(keras.callbacks.EarlyStopping)
