"""One rank fails: the job ends, with that rank's error, and nobody waits."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator

from backends.base import Backend
from collective.errors import CollectiveError


@contextlib.contextmanager
def ends_the_job(backend: Backend) -> Iterator[None]:
    """Ends all ranks when one of them leaves the block by an exception.

    An error that every rank meets alike needs no help: each leaves by itself. Any
    other would leave the rest waiting in the next collective, so the rank that failed
    tells what happened and aborts the job with its exit code.
    """
    try:
        yield
    except BaseException as error:
        alike = isinstance(error, CollectiveError) and error.everywhere
        if isinstance(error, CollectiveError):
            error.rank = backend.rank
        if backend.size == 1 or alike or isinstance(error, SystemExit):
            raise
        echo = backend.ended_by_another(error)
        if echo is not None:  # that rank has told what happened
            raise SystemExit(echo) from None
        if isinstance(error, CollectiveError):
            print(f"rank {backend.rank}: error: {error}", file=sys.stderr, flush=True)
            backend.abort(error.exit_code)
        traceback.print_exc()
        print(
            f"rank {backend.rank}: {type(error).__name__} ended the job",
            file=sys.stderr,
        )
        sys.stderr.flush()
        backend.abort(130 if isinstance(error, KeyboardInterrupt) else 1)
        raise
