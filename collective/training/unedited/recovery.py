"""Calls of an elastic job (``--min-np``) that the death of a rank interrupts.

Within a training ``collective.fit`` continues by itself. Everything else is repeated whole
by the ranks that are left: how a training begins, evaluations, predictions, saves. A rank
dies while some ranks may be at the end of a call and others in the next one. So each call
ends with a barrier, and after each change of the ranks all first exchange how far they
are: a rank that has passed the barrier of a call knows that every rank has its result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import keras

from collective import streams
from collective.backends.base import Backend
from collective.backends.capabilities import Elastic
from collective.errors import CollectiveError, ProcessExit
from collective.training.failure import ends_the_job
from collective.training.loop.result import Result
from collective.training.object_collectives import gather_few
from collective.training.random_state import RandomState
from collective.training.unedited.units import Removal

T = TypeVar("T")
# How far a rank is in a call. ``_TRAINS``: ``collective.fit`` continues by itself.
_WORKS, _TRAINS, _ENDED = range(3)


class _Decision(CollectiveError):
    """What the surviving ranks do with the current call; the script never sees it."""

    def __init__(self) -> None:
        super().__init__("the ranks of the job have changed", hint="")


class _Repeat(_Decision):
    """The ranks repeat the call."""


class _Ended(_Decision):
    """Every rank has its result."""


@dataclass(frozen=True)
class _Outcome:
    """What a call returned or raised."""

    result: Any
    error: Exception | None = None

    def taken(self) -> Any:
        """The result, or raises the error."""
        if self.error is not None:
            raise self.error
        return self.result


class Recovery:
    """Runs the calls that all ranks make together, again after ranks have died."""

    def __init__(self, backend: Backend):
        # What this rank does after each change of the ranks, before it exchanges
        # anything with others.
        self.on_change: list[Callable[[], None]] = []
        self._backend = backend
        self._number, self._stage = 0, _ENDED  # of the current call
        self._size = backend.size
        self._outside = False  # whether the ranks change outside of a training
        self._elastic: Elastic | None = None
        if isinstance(backend, Elastic) and backend.elastic:
            self._elastic = backend
            backend.on_change = self._agree

    def close(self) -> None:
        """Ends the repetition of calls."""
        if self._elastic is not None:
            self._elastic.on_change = None
            self._elastic = None

    def end_script(self) -> None:
        """Waits for the other ranks at the end of the script.

        Raises:
            CollectiveError: On every rank: rank 0 has died since its last call. What it
                would have printed and written since is lost.
        """
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

    def run(
        self,
        attempt: Callable[[], T],
        what: str,
        model: keras.Model | None = None,
        data: Sequence[Any] = (),
    ) -> T:
        """Runs a call, until every rank that is left has its result.

        Args:
            attempt: Makes the call. It is repeated from its begin, unless a training
                continues.
            model: Whose seeds an attempt may count up.
            data: What it reads; iterators cannot be read again.

        Raises:
            CollectiveError: It cannot be repeated, or too few ranks are left. The job
                ends.
        """
        if self._elastic is None:
            return attempt()
        streams.flush()  # so that what rank 0 has printed outlives it
        self._number += 1
        self._size = self._backend.size
        before = RandomState(model)
        while True:
            self._stage = _WORKS
            found: _Outcome | None = None
            try:
                found = self._outcome(attempt)
                self._end(found.result)
            except _Ended:
                pass
            except _Repeat:
                found = None
            except Exception as error:
                if self.is_interrupted(error):
                    found = None
            if found is not None:
                return found.taken()
            self._prepare_repetition(what, data)
            before.put()

    def _outcome(self, attempt: Callable[[], Any]) -> _Outcome:
        """What an attempt returns, or what every rank raises in it."""
        try:
            return _Outcome(attempt())
        except _Decision:
            raise
        except Exception as error:
            if self._elastic is not None and self._elastic.is_repeated(error):
                raise
            return _Outcome(None, error)

    def passed_removal(self) -> None:
        """Do nothing: a removal is no call of its own."""

    def interrupted_removal(self, error: Exception) -> Removal:
        """After the death of ranks in a removal, continue with those that are left."""
        self.is_interrupted(error)
        return Removal.REPEATED

    def is_interrupted(self, error: Exception) -> bool:
        """After the death of ranks, continues with those that are left.

        Args:
            error: What a collective has raised, outside of a training.

        Returns:
            Whether the current call is to be repeated; False: every rank has its result.

        Raises:
            Exception: The error, if no rank has died.
        """
        if self._elastic is None or not self._elastic.is_repeated(error):
            raise error
        self._outside = True
        try:
            self._elastic.regroup()
        except _Repeat:
            return True
        except _Ended:
            return False
        finally:
            self._outside = False
        raise AssertionError("outside of a training each change ends in a decision")

    def _end(self, result: Any) -> None:
        """Waits until every rank has its result."""

        def wait() -> None:
            self._stage = _ENDED
            self._backend.barrier()

        if isinstance(result, Result):
            result.afterwards(wait)  # may return to the last steps of the training
        else:
            wait()

    def _agree(self) -> None:
        """Decides with all ranks that are left; returns where a training continues.

        Raises:
            _Repeat, _Ended: What they do with the current call.
        """
        for action in self.on_change:
            action()
        if self._stage != _ENDED:
            self._stage = _WORKS if self._outside else _TRAINS
        mine = [self._number, self._stage]
        decision = decide(mine, gather_few(self._backend, mine).tolist(), self._outside)
        if decision is not None:
            raise decision()
        self._stage = _TRAINS

    def _prepare_repetition(self, what: str, data: Sequence[Any]) -> None:
        backend, before = self._backend, self._size
        self._size = size = backend.size
        least = backend.options.min_np or 1
        left = f"of {before} ranks {size} {'is' if size == 1 else 'are'} left"
        if size < least:
            self._end_job(
                f"{what}: {left}, and --min-np is {least}",
                "a smaller --min-np; keras.callbacks.BackupAndRestore continues fit "
                "with its last epoch",
            )
        if any(isinstance(part, Iterator) for part in data):
            self._end_job(
                f"{what}: {left}, and the call cannot be repeated: its data are an "
                "iterator, which gives each batch once",
                "an array, a keras.utils.PyDataset or a tf.data.Dataset",
            )
        if backend.rank == 0:
            repeat = "repeats" if size == 1 else "repeat"
            print(
                f"collective: {left}, and {repeat} {what}", file=sys.stderr, flush=True
            )

    def _end_job(self, message: str, hint: str) -> None:
        """Ends the job by rank 0's error, which the script cannot catch."""
        backend = self._backend
        error = CollectiveError(message, hint=hint, everywhere=False)
        if backend.size == 1:
            print(f"rank 0: error: {error}", file=sys.stderr, flush=True)
            raise ProcessExit(error.exit_code)
        with ends_the_job(backend):
            if backend.rank:
                backend.barrier()  # until rank 0 ends the job
            raise error


def decide(
    mine: list[int], of_all: Sequence[list[int]], outside: bool
) -> type[_Decision] | None:
    """Decides what a rank does after a change of the ranks; None if its training continues.

    Args:
        mine: The number of its call, and its stage in that call.
        of_all: The same two numbers of every surviving rank.
        outside: Whether it has noticed the change outside of a training.
    """
    number, stage = mine
    least = min(of_all)
    if stage == _ENDED and least >= [number, _ENDED]:
        return _Ended
    if outside or least < [number, _TRAINS]:
        return _Repeat
    return None
