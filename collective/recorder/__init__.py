"""The flight recorder: what each rank did last, written out when a job stalls or breaks.

Every rank keeps its last few hundred collectives and steps, and each second the Python
line of its main thread, in memory that the ranks of its host share. So what a rank did
that was killed can be written by another rank. On a stall, a mismatch, a desync or a death
one rank of each host writes an account of all ranks there to a file, and its essence to
stderr; ``python -m collective.recorder FILE...`` merges the files of several hosts.

It is always on where a job has several ranks. ``COLLECTIVE_RECORDER`` names the folder
for accounts, instead of the working directory; ``off`` switches it off.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
from types import TracebackType

from collective import library
from collective.environment import Environment
from collective.errors import CollectiveError

VARIABLE = "COLLECTIVE_RECORDER"
# What a rank is at besides the core's own collectives: numbers of the core's ring.
ALL_REDUCE, BROADCAST, BARRIER, OTHER = 0, 1, 5, 7

remedy = ""  # what to type when this job has ended by an incident

_opened: tuple[int, Environment, str] | None = None  # process, and whose recorder
# Where the training loop is, and since when: ``at`` and ``since`` of native/recorder/recorder.h.
_nowhere = memoryview(bytearray(16)).cast("d")
_position = _nowhere


def start(environment: Environment, job: str, called: int | None = None) -> None:
    """Opens this rank's recorder; every rank of the host calls it.

    Does nothing in a job of one rank, for a rank that comes later, or where it is open.
    Where it cannot be opened the job goes on without.

    Args:
        environment: This process' place in the job.
        job: A name that the ranks share, and no other job of the user has.
        called: What the launcher calls this process; its rank by default.
    """
    alone = environment.size == 1 or environment.joining
    if alone or _opened == (os.getpid(), environment, job) or _folder() == "off":
        return
    close()
    place = environment
    code = library.load().collective_recorder_open(
        place.rank,
        place.size,
        place.local_rank,
        place.local_size,
        job.encode(),
        place.rank if called is None else called,
    )
    _begin(environment, job, code)


def follow(environment: Environment, called: Environment | None) -> None:
    """Goes on among the ranks that a job of the core has now; each of them calls it.

    What this rank did before is kept; ranks that have left are omitted from later dumps.

    Args:
        environment: This process' place among them.
        called: What the launcher calls this process, where it has just come.
    """
    if _folder() == "off":
        return
    job = "" if _opened is None else _opened[2]
    if _opened is not None:
        library.load().collective_recorder_settle()
    close()
    number = environment.rank if called is None else called.rank
    code = library.load().collective_recorder_follow(number, called is not None)
    _begin(environment, job, code)


def renumber(environment: Environment) -> None:
    """As ``follow``, where ranks are gone from a job that is not the core's.

    Args:
        environment: This process' place among those that are left.
    """
    if _opened is not None:
        from collective.recorder import watch

        library.load().collective_recorder_settle()
        library.load().collective_recorder_renumber(environment.rank)
        watch.place = environment


def _begin(environment: Environment, job: str, code: int) -> None:
    """Watches what the core has opened, if it has."""
    global _opened, _position
    from collective.recorder import watch

    try:
        library.check(code)
    except CollectiveError:
        return
    _opened = os.getpid(), environment, job
    place = library.load().collective_recorder_position()
    shared = (ctypes.c_double * 2).from_address(place)
    _position = memoryview(shared).cast("B").cast("d")
    if not faulthandler.is_enabled():
        with contextlib.suppress(ValueError, OSError, RuntimeError):  # no stderr
            faulthandler.enable()  # a crash within C shows its Python line, too
    watch.begin(environment, _folder() or os.getcwd())
    atexit.register(close)


def close() -> None:
    """Says goodbye: that this process then ends is no incident."""
    global _opened, _position
    if _opened is None or _opened[0] != os.getpid():
        return
    from collective.recorder import watch

    _opened, _position = None, _nowhere
    atexit.unregister(close)
    library.load().collective_recorder_close()
    watch.end()


def incident(what: str) -> None:
    """Has an account written, and waits for it.

    Args:
        what: The trouble, in one sentence.
    """
    if _opened is not None:
        library.load().collective_recorder_incident(what.encode())


def advise(what: str) -> None:
    """Has it printed with every account what to type if the job has ended by it."""
    global remedy
    remedy = what


def waits_for_input(step: int, since: float) -> None:
    """The training loop waits for a step's input.

    Args:
        step: Its number.
        since: In seconds of ``time.perf_counter``.
    """
    _position[1] = since
    _position[0] = 1 + 2 * step


def in_step(step: int, since: float) -> None:
    """The training loop is within a step; as ``waits_for_input``."""
    _position[1] = since
    _position[0] = 2 + 2 * step


def in_no_step() -> None:
    """The training loop is neither."""
    _position[0] = 0


def _forked() -> None:
    """A forked child records nothing of its training loop."""
    global _position
    _position = _nowhere


os.register_at_fork(after_in_child=_forked)


class span(contextlib.AbstractContextManager[None]):
    """Records what this rank is at, from entering to leaving.

    Args:
        kind: A collective that the core does not run, or ``OTHER``.
        name: What it is.
        size: Bytes that it moves.
    """

    def __init__(self, kind: int, name: str, size: int = 0):
        self._what = (kind, name, size)
        self._number = 0

    def __enter__(self) -> None:
        if _opened is not None:
            kind, name, size = self._what
            self._number = library.load().collective_recorder_begin(
                kind, name.encode(), size
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._number:
            library.load().collective_recorder_end(self._number, kind is not None)


def _folder() -> str:
    return os.environ.get(VARIABLE, "")
