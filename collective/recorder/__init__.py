"""The flight recorder: the last operations of each rank, written when a job stalls or breaks.

Each rank records its last 512 collectives and spans, and once a second the stack of its
main thread, in memory that the ranks of its host share. So another rank can write the
record of a rank that was killed. On a stall, a mismatch, a desync or a death, one rank of
each host writes a dump of all its ranks to a file and a summary to stderr.
``python -m collective.recorder FILE...`` merges the files of several hosts.

Every job of several ranks records. ``COLLECTIVE_RECORDER`` names the folder for dumps,
instead of the working directory; ``COLLECTIVE_RECORDER=off`` switches the recorder off.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import tempfile
from collections.abc import Callable
from types import TracebackType

from collective import library
from collective.environment import Environment
from collective.errors import CollectiveError

VARIABLE = "COLLECTIVE_RECORDER"
# Kinds of the spans that are not collectives of the core (native/recorder/recorder.h).
ALL_REDUCE, BROADCAST, BARRIER, OTHER = 0, 1, 5, 7

_opened: tuple[int, Environment, str] | None = None  # process, rank and job
# ``at`` and ``since`` of native/recorder/recorder.h.
_nowhere = memoryview(bytearray(16)).cast("d")
_position = _nowhere


def start(environment: Environment, job: str, launch_rank: int | None = None) -> None:
    """Open this rank's recorder; every rank of the host calls it.

    Does nothing in a job of one rank, in a rank that joins later, and if the recorder
    is open. If the recorder cannot be opened, the job runs without it.

    Args:
        environment: This process' rank in the job.
        job: Name of the job, unique among the jobs of the user.
        launch_rank: Rank that the launcher gave this process; by default its rank.
    """
    unused = environment.size == 1 or environment.joining
    if unused or _opened == (os.getpid(), environment, job) or _folder() == "off":
        return
    close()
    code = library.load().collective_recorder_open(
        environment.rank,
        environment.size,
        environment.local_rank,
        environment.local_size,
        job.encode(),
        environment.rank if launch_rank is None else launch_rank,
    )
    _begin(environment, job, code)


def reopen(environment: Environment, launched: Environment | None) -> None:
    """Continue after a reconfiguration of the core; every rank of the job calls it.

    Keeps this rank's entries; ranks that have left are omitted from later dumps.

    Args:
        environment: This process' rank in the new job.
        launched: The rank that the launcher gave it, if it has just joined.
    """
    if _folder() == "off":
        return
    job = "" if _opened is None else _opened[2]
    if _opened is not None:
        library.load().collective_recorder_await_dumps()
    close()
    launch_rank = (launched or environment).rank
    code = library.load().collective_recorder_reopen(launch_rank, launched is not None)
    _begin(environment, job, code)


def renumber(environment: Environment) -> None:
    """Do as ``reopen``, in a job that is not the core's, after ranks have left.

    Args:
        environment: This process' rank among those that remain.
    """
    if _opened is not None:
        from collective.recorder import watch

        library.load().collective_recorder_await_dumps()
        library.load().collective_recorder_renumber(environment.rank)
        watch.rank_info = environment


def _begin(environment: Environment, job: str, code: int) -> None:
    """Start the watching thread, if the core has opened a recorder."""
    global _opened, _position
    from collective.recorder import watch

    try:
        library.check_code(code)
    except CollectiveError:
        return
    _opened = os.getpid(), environment, job
    address = library.load().collective_recorder_position()
    shared = (ctypes.c_double * 2).from_address(address)
    _position = memoryview(shared).cast("B").cast("d")
    if not faulthandler.is_enabled():
        with contextlib.suppress(ValueError, OSError, RuntimeError):  # no stderr
            faulthandler.enable()  # shows the Python line of a crash in C
    folder = _folder()
    if not folder:
        with contextlib.suppress(FileNotFoundError):  # the working directory is gone
            folder = os.getcwd()
    watch.start_watching(environment, folder or tempfile.gettempdir())
    atexit.register(close)


def close() -> None:
    """Close the recorder: after this, the end of the process is not an incident."""
    global _opened, _position
    if _opened is None or _opened[0] != os.getpid():
        return
    from collective.recorder import watch

    _opened, _position = None, _nowhere
    atexit.unregister(close)
    library.load().collective_recorder_close()
    watch.stop_watching()


def request_dump(reason: str) -> None:
    """Report a fault, and wait until all ranks of this host are dumped."""
    if _opened is not None:
        library.load().collective_recorder_request_dump(reason.encode())


def advise(what: Callable[[], str]) -> None:
    """Set the function that returns the hint of each dump: what to type next."""
    from collective.recorder import watch

    watch.advice = what


def waits_for_input(step: int, since: float) -> None:
    """Record that the training loop waits for the input of a step.

    Args:
        since: When the wait began, in seconds of ``time.perf_counter``.
    """
    _position[1] = since
    _position[0] = 1 + 2 * step


def in_step(step: int, since: float) -> None:
    """Record that the training loop is within a step; see ``waits_for_input``."""
    _position[1] = since
    _position[0] = 2 + 2 * step


def in_no_step() -> None:
    """Record that the training loop neither waits for input nor is within a step."""
    _position[0] = 0


def _forked() -> None:
    """Make a forked child record nothing."""
    global _position
    _position = _nowhere


os.register_at_fork(after_in_child=_forked)


class span(contextlib.AbstractContextManager[None]):
    """Context manager: records a span of this rank.

    kind: A collective that the core does not run, or ``OTHER``.
        kind: A collective that the core does not run, or ``OTHER``.
        name: Shown in dumps.
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
