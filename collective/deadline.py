"""``COLLECTIVE_TIMEOUT`` for waits that the core does not watch.

MPI, Horovod and TensorFlow's own collectives wait for ever for a rank that is stopped,
or stuck in its own code. A backend that uses them calls ``watch`` once and enters
``waiting`` around each call that ends only when other ranks take part. A thread ends
the job when a wait has taken too long. Time in which this process did not run does not
count.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from collective import recorder
from collective.environment.seconds import TIMEOUT, TIMEOUT_SECONDS, seconds
from collective.running_time import Stops

EXIT_CODE = 1
_POLL_SECONDS = 0.5
# Time for the dump and for the function that ends the job: MPI_Abort may itself wait.
_END_SECONDS = 15.0

_waits: dict[int, waiting] = {}  # the waits under way, by their ids
_limit = TIMEOUT_SECONDS
_rank = 0
_end: Callable[[int], None] | None = None  # None: nothing is watched


def watch(rank: int, end: Callable[[int], None]) -> None:
    """Watch the waits of this process from now on.

    Args:
        rank: The rank of this process, for messages.
        end: Ends the whole job, with an exit code; called from another thread.

    Raises:
        UsageError: If ``COLLECTIVE_TIMEOUT`` is not a time.
    """
    global _limit, _rank, _end
    _limit, _rank, begins = seconds(TIMEOUT, TIMEOUT_SECONDS), rank, _end is None
    _end = end
    if begins:
        threading.Thread(target=_watch, name="deadline", daemon=True).start()


class waiting(contextlib.AbstractContextManager[None]):
    """Context manager: this rank waits for others.

    Args:
        what: What this rank waits for, such as "in MPI_Barrier".
        more: Seconds that the wait may take beyond the time-out.
    """

    def __init__(self, what: str, more: float = 0.0):
        self.what, self.more = what, more
        self.since = 0.0

    def __enter__(self) -> None:
        if _end is not None:
            self.since = time.monotonic()
            _waits[id(self)] = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _waits.pop(id(self), None)


def _watch() -> None:
    stops = Stops()
    while True:
        time.sleep(_POLL_SECONDS)
        now = stops.look()
        for wait in list(_waits.values()):
            waited = now - wait.since - stops.since(wait.since)
            if waited > _limit + wait.more:
                _end_job(wait, waited)


def _end_job(wait: waiting, waited: float) -> None:
    """Report the wait, with a dump of all ranks of this host, and end the job."""
    # Needs no interpreter lock: a call that never returns may hold it.
    faulthandler.dump_traceback_later(_END_SECONDS, exit=True)
    happened = f"rank {_rank} waited {waited:.0f} s for other ranks {wait.what}"
    recorder.request_dump(happened)
    print(
        f"rank {_rank}: error: {happened}\n"
        "HINT: a rank that does not print this is stopped, stuck or in another call; "
        f"{TIMEOUT}=seconds gives more time to one that is only slow",
        file=sys.stderr,
        flush=True,
    )
    recorder.close()  # the end of this process is not a second incident
    assert _end is not None
    _end(EXIT_CODE)


def _forget() -> None:
    """Clear the waits in a forked process, which waits for no rank."""
    global _end
    _end = None
    _waits.clear()


os.register_at_fork(after_in_child=_forget)
