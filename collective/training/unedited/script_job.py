"""The ranks that run one script together, and the calls that they make together.

Each rank runs the whole script. Where it calls Keras' ``fit``, all ranks must call it;
so each such call begins with a message of a few bytes from rank 0. A rank at a different
call than rank 0 raises an error that names both calls, instead of hanging.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from collective.backends.base import Backend
from collective.errors import CollectiveError
from collective.log import log
from collective.replacements import replacing
from collective.training.keras_compat import batch_functions
from collective.training.partition.devices import supports
from collective.training.process.failure import ends_the_job
from collective.training.process.object_collectives import broadcast_object, gather_few
from collective.training.sharding.placing import Placing
from collective.training.unedited.resume import StateFolder
from collective.training.unedited.units import Removal, ScriptUnits

# The calls that all ranks make together. The message from rank 0 has an index into this.
CALLS = (
    "Model.fit",
    "Model.evaluate",
    "Model.predict",
    "a save of a model",
    "a step of a training loop",
    "a removal or renaming of a file",
    "a read of standard input",
    "a search of hyperparameters",
)
FIT, EVALUATE, PREDICT, SAVE, LOOP, REMOVE, INPUT, SEARCH = CALLS
_REMOVAL = CALLS.index(REMOVE)


class ScriptJob:
    """The state that the replaced functions share; it also restores the originals."""

    def __init__(self, backend: Backend, folder: StateFolder | None = None):
        self.backend = backend
        self.folder = folder
        self.units = ScriptUnits(backend, folder)  # repeats what a death interrupts
        self.units.on_change.append(self._changed)
        # What this rank does when it becomes rank 0, because that died or left.
        self.takes_over: list[Callable[[], None]] = []
        # What all ranks do together at the end of a script that ends well.
        self.before_end: list[Callable[[], None]] = []
        self.replica_counts = {backend.replicas}  # all that the job has had
        self.used: set[str] = set()  # the calls that the script has made so far
        self.fits = 0  # its calls of ``fit`` so far without a seed
        # What all ranks do together before a save of a model: they compare what it is of.
        self.before_saves: list[Callable[[], None]] = []
        # Around each save of a model, on every rank: rank 0 alone reads what it writes.
        # Not around removals, to which some ranks come without rank 0.
        self.around_writes: list[Callable[[], AbstractContextManager[None]]] = []
        # The seed of random generators if the script had set none.
        self.seed: int | None = None
        self.made: set[str] = set()  # files that this rank, or another, has made
        self.shared_names: set[str] = set()  # of temporary files, alike on all ranks
        # What each rank does once it has begun a call that all ranks make.
        self.at_meetings: list[Callable[[], None]] = []
        # Where this rank, not rank 0, keeps the files that it seems to have written.
        self.copies: dict[str, str] = {}
        # What cuts the variables that the script makes; or None, and why.
        self.placing: Placing | None = None
        self.why_not_placing = "the ranks of this job hold all variables whole"
        self.undone = False
        self._noted: set[str] = set()
        self._depth = 0
        self._pending: np.ndarray | None = None  # rank 0's call, received early
        self._is_rank_zero = backend.rank == 0
        self._replaced = contextlib.ExitStack()
        self.on_undo(self.units.close)

    @property
    def is_shared(self) -> bool:
        """Return whether the ranks compare what they do, or a record is kept of it.

        So the units of a script are the same whether a job has one rank or several.
        """
        return self.backend.size > 1 or self.units.are_kept

    @functools.cached_property
    def by_strategy(self) -> bool:
        """Return whether all models are trained by a strategy of TensorFlow's."""
        return hasattr(self.backend, "strategy") or not supports(self.backend)

    def _changed(self) -> None:
        """Take note of a change of the ranks."""
        self._pending = None  # rank 0 begins the call again
        self.replica_counts.add(self.backend.replicas)
        if self.backend.rank == 0 and not self._is_rank_zero:
            self._is_rank_zero = True
            for action in self.takes_over:
                action()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a class or module, until ``undo``."""
        self._replaced.enter_context(replacing(owner, name, value, new=True))

    def enter(self, context: AbstractContextManager[Any]) -> None:
        """Enter a context, which ``undo`` leaves."""
        self._replaced.enter_context(context)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Have ``undo`` do something more."""
        self._replaced.callback(action)

    def undo(self) -> None:
        """Put back everything that was replaced, the last first."""
        self.undone = True
        self._replaced.close()

    def warn_once(self, name: str, text: str, *args: Any) -> None:
        """Log a warning on rank 0; one for each name."""
        if self.backend.rank == 0 and name not in self._noted:
            log.warning(text, name, *args)
        self._noted.add(name)

    @property
    def inside(self) -> bool:
        """Return whether one of our functions runs: what it calls of Keras is Keras' own.

        So are calls from callbacks, which run on rank 0 only.
        """
        return self._depth > 0

    @contextlib.contextmanager
    def alone(self, model: keras.Model) -> Iterator[None]:
        """Inside, this rank makes calls of Keras that no other rank makes."""
        self._depth += 1
        try:
            with batch_functions.keras_own(model):
                yield
        finally:
            self._depth -= 1

    def meet(self, call: str) -> None:
        """Begin one of ``CALLS``, which every rank makes, and which may make others.

        Raises:
            CollectiveError: Rank 0 makes another call. The job ends.
        """
        self.used.add(call)
        if self.is_shared:
            with ends_the_job(self.backend):
                self.units.run(lambda: self._meet(call, ""), call)
            self._has_met()

    @contextlib.contextmanager
    def calling(self, call: str, detail: str = "") -> Iterator[bool]:
        """Meet the other ranks at one of ``CALLS``, which every rank makes.

        Yields:
            Whether the detail, which may differ between ranks as a path, is rank 0's.

        Raises:
            CollectiveError: Rank 0 makes another call. The job ends.
        """
        self.used.add(call)
        same = True
        if self.is_shared:
            with ends_the_job(self.backend):
                same = self._meet(call, detail)
            self._has_met()
        self._depth += 1
        try:
            yield same
        finally:
            self._depth -= 1

    def _has_met(self) -> None:
        for action in self.at_meetings:
            action()

    def _meet(self, call: str, detail: str) -> bool:
        mine = _message(call, detail)
        first = self._first_call(mine)
        # Rank 0 removes a file that this rank does not see.
        while first[0] == _REMOVAL != mine[0]:
            self._pass_removal()
            first = self._first_call(mine)
        if first[0] != mine[0]:
            raise CollectiveError(
                f"rank {self.backend.rank} is in {call}, and rank 0 in "
                f"{CALLS[int(first[0])]}: every rank must make the same calls of Keras",
                hint="leave out `if rank == 0:` around them; a model is written by "
                "rank 0 only anyway",
                everywhere=False,
            )
        return bool(first[1] == mine[1])

    def _first_call(self, mine: np.ndarray) -> np.ndarray:
        """Return the call that rank 0 makes next, and a digest of its detail."""
        pending, self._pending = self._pending, None
        return self.backend.broadcast_array(mine) if pending is None else pending

    def _reading(self, call: str) -> AbstractContextManager[None]:
        """Have the other ranks take part in what rank 0 alone reads."""
        if self.placing is None or call != SAVE:
            return contextlib.nullcontext()
        return self.placing.read_alone()

    def remove(self, paths: Sequence[str], remove: Callable[[], Any]) -> Any:
        """Remove or rename a file on rank 0, once every rank has reached this call.

        If rank 0 removes a file different from this rank's, then it is behind, and removes
        what this rank has made already; or the file has another name on each rank. A
        rank alone removes what it has made itself, and nothing else: another rank that
        is ahead has made it, and for rank 0 there was no such file.

        Returns:
            What ``remove`` returns, or None on ranks that removed nothing.

        Raises:
            Exception: What rank 0's removal has raised, on every rank.
        """
        once, state = _Once(remove), self.units.replayed_removal()
        if state is not None:
            return once() if state is Removal.OWN and paths[0] in self.made else None
        while True:
            try:
                return self._remove(paths[0], once)
            except Exception as error:
                state = self.units.interrupted_removal(error)
            if state is Removal.DONE:
                return None
            if state is Removal.OWN:
                return once() if paths[0] in self.made else None
            once.may_be_gone = True

    def _remove(self, path: str, remove: Callable[[], Any]) -> Any:
        if self.backend.rank == 0:
            return self._write(path, remove, REMOVE)
        mine, failure = _message(REMOVE, path), None
        with ends_the_job(self.backend):
            first = self._first_call(mine)
            while first[0] == _REMOVAL and first[1] != mine[1] and self._made(first):
                self._pass_removal()
                first = self._first_call(mine)
            if first[0] == _REMOVAL and (first[1] == mine[1] or path in self.made):
                failure = self._pass_removal()
            else:
                self._pending = first
        if tuple(first) != tuple(mine):
            return remove() if path in self.made else None
        if failure is not None:
            raise failure
        return None

    def _pass_removal(self) -> Exception | None:
        """Wait until rank 0 has removed a file; return what that has raised."""
        self._wait_for_all()
        failure: Exception | None = broadcast_object(self.backend, None)
        self.units.passed_removal()
        return failure

    def _wait_for_all(self) -> None:
        """Wait until every rank is here, and may read no more of what rank 0 changes.

        A broadcast need not wait: rank 0 ends that of MPI before others have begun it.
        """
        if self.is_shared:
            gather_few(self.backend, [1])

    def _made(self, call: np.ndarray) -> bool:
        """Return whether rank 0 removes what this rank has made."""
        return any(call[1] == _message(REMOVE, path)[1] for path in self.made)

    def write(self, path: str, write: Callable[[], Any]) -> Any:
        """Write a file on rank 0, and on ranks whose path is another one.

        Args:
            path: What distinguishes the file from others.
            write: Writes it; again where rank 0 has died meanwhile.

        Returns when it is written, so every rank can read it then: what ``write``
        returned; None on ranks that wrote nothing.

        Raises:
            Exception: As ``write`` raised it; on every rank if rank 0's did.
        """
        for action in self.before_saves:
            action()
        return self.units.run(lambda: self._write(path, write, SAVE), SAVE)

    def _write(self, path: str, write: Callable[[], Any], call: str) -> Any:
        result, failure = None, None
        with self.calling(call, path) as same, contextlib.ExitStack() as around:
            self._wait_for_all()
            for context in self.around_writes if call == SAVE else ():
                around.enter_context(context())
            if self.backend.rank and same:
                if self.placing is not None and call == SAVE:
                    self.placing.serve()
            else:
                try:
                    with self._reading(call):
                        result = write()
                except Exception as error:
                    failure = error
            of_rank_zero = broadcast_object(self.backend, _sendable(failure))
            if call == REMOVE:
                self.units.passed_removal()
        failure = failure or (of_rank_zero if same else None)
        if failure is not None:
            raise failure
        return result


class _Once:
    """A removal, which happens once though ranks die meanwhile."""

    may_be_gone = False  # whether rank 0 may have died after it had removed the file

    def __init__(self, remove: Callable[[], Any]):
        self._remove = remove
        self._done = False
        self._result: Any = None

    def __call__(self) -> Any:
        if not self._done:
            try:
                self._result = self._remove()
            except FileNotFoundError:
                if not self.may_be_gone:
                    raise
            self._done = True
        return self._result


def _message(call: str, detail: str) -> np.ndarray:
    """Return the number of a call, and a digest of its detail."""
    digest = hashlib.sha256(detail.encode(errors="surrogateescape")).digest()
    return np.array([CALLS.index(call), int.from_bytes(digest[:7], "big")])


def _sendable(failure: Exception | None) -> Exception | None:
    """Return an exception, or its text in a RuntimeError if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(failure))
        return failure
    except Exception:
        return RuntimeError(f"{type(failure).__name__}: {failure}")
