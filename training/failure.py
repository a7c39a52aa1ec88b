"""One rank fails: the job ends with that rank's error, and no rank waits for it."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator

import tensorflow as tf

from collective import recorder
from collective.backends.base import Backend
from collective.errors import CollectiveError, EndedByAnotherRank, UsageError


@contextlib.contextmanager
def ends_the_job(backend: Backend) -> Iterator[None]:
    """Ends all ranks when one of them leaves the block by an exception.

    An error that every rank raises alike needs no help: each ends by itself. After any
    other the rest would wait in the next collective, so the rank that failed prints
    what happened and aborts the job with its exit code.

    Raises:
        EndedByAnotherRank: The error says only that another rank has ended the job.
    """
    try:
        yield
    except BaseException as error:
        alike = isinstance(error, CollectiveError) and error.everywhere
        if isinstance(error, CollectiveError):
            error.rank = backend.rank
        if backend.size == 1 or alike or isinstance(error, SystemExit):
            raise
        exit_code = backend.ended_by_another(error)
        if exit_code is not None:
            raise EndedByAnotherRank(exit_code) from None
        if isinstance(error, KeyboardInterrupt):
            recorder.close()
            print(f"rank {backend.rank}: interrupted", file=sys.stderr, flush=True)
            backend.abort(130)
            raise
        recorder.request_dump(_description(backend.rank, error))
        recorder.close()  # its end is no second incident
        if isinstance(error, CollectiveError):
            print(f"rank {backend.rank}: error: {error}", file=sys.stderr, flush=True)
            backend.abort(error.exit_code)
        traceback.print_exc()
        print(
            f"rank {backend.rank}: {type(error).__name__} ended the job",
            file=sys.stderr,
        )
        sys.stderr.flush()
        backend.abort(1)
        raise


def _description(rank: int, error: BaseException) -> str:
    file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
    return f"rank {rank} failed: {type(error).__name__} at {file}:{line}\n{error}"


@contextlib.contextmanager
def explaining_memory() -> Iterator[None]:
    """Adds a remedy to errors about memory; used within ``ends_the_job``."""
    try:
        yield
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:
        text = error.message if isinstance(error, tf.errors.OpError) else str(error)
        first = re.sub(r"^{{.*?}} ", "", text.split("\n")[0])
        raise UsageError(
            f"out of memory: {first}",
            hint="--accumulate 4 cuts each update into smaller pieces",
            exit_code=1,
            everywhere=False,
        ) from error
