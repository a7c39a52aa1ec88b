"""One rank fails: the job ends with that rank's error, and no rank waits for it."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from collective import recorder, streams
from collective.backends.base import Backend
from collective.backends.capabilities import Elastic
from collective.errors import CollectiveError, EndedByAnotherRank, UsageError
from collective.training.process import interrupts, readers  # noqa: F401
from collective.training.process.names import arguments_named
from collective.training.process.object_collectives import broadcast_object

# Errors that every rank raises, for ``ends_the_job``: rank 0's last error, and the last
# error that each rank had by itself.
_shared: list[BaseException] = []
_alike: list[BaseException] = []
# Before a script runs; some systems set one (Ubuntu's apport).
_HOOK_AT_START = sys.excepthook
# The time for which a rank that fails looks for others that fail alike.
_ALIKE_SECONDS = 3.0


@contextlib.contextmanager
def ends_the_job(backend: Backend) -> Iterator[None]:
    """End all ranks when one of them leaves the block by an exception.

    An error that every rank raises alike is raised to the caller, who may catch it and
    continue. The death of a rank is raised, too, if the caller repeats the interrupted work
    (``Elastic.on_change``). After any other error the other ranks would wait in the next
    collective, so the rank that failed prints its error and aborts the job with its exit
    code.

    Raises:
        EndedByAnotherRank: The error says only that another rank has ended the job.
    """
    try:
        yield
    except BaseException as error:
        alike = isinstance(error, CollectiveError) and error.everywhere
        if any(error is one for one in (*_shared, *_alike)):
            raise
        if isinstance(error, CollectiveError):
            error.rank = backend.rank
        if backend.size == 1 or alike or isinstance(error, SystemExit):
            raise
        exit_code = backend.ended_by_another(error)
        if exit_code is not None:
            raise EndedByAnotherRank(exit_code) from None
        if isinstance(backend, Elastic) and backend.is_repeated(error):
            raise
        if isinstance(error, KeyboardInterrupt) and interrupts.agreed():
            raise
        if isinstance(error, KeyboardInterrupt) or interrupts.noticed():
            recorder.close()
            streams.report(f"rank {backend.rank}: interrupted")
            backend.abort(interrupts.INTERRUPTED)
            raise
        if fails_alike(error, backend):
            _alike[:] = [error]
            if backend.rank:
                _when_uncaught(error, lambda: None, prints=False)
            raise
        if not isinstance(error, UsageError):  # a UsageError needs no traceback
            recorder.request_dump(_description(backend.rank, error))
        recorder.close()  # the end of this process is not a second incident
        exit_code, what = 1, f"{type(error).__name__} ended the job"
        if isinstance(error, CollectiveError):
            exit_code, what = error.exit_code, f"error: {error}"
        else:
            streams.report(traceback.format_exc().rstrip())
        streams.report(f"rank {backend.rank}: {what}")
        backend.abort(exit_code)
        raise


def fails_alike(error: BaseException, backend: Backend) -> bool:
    """Return whether every rank has failed with this error, at the same line.

    The answer is False after an error in the middle of a graph, because the backend may
    still wait for parts of its sums; and after an error about memory.
    """
    if backend.size == 1:
        return True
    if not isinstance(error, Exception) or isinstance(error, CollectiveError):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    if isinstance(error, tf.errors.OpError):
        calls = [vars(kind).get("call") for kind in type(backend).__mro__]
        codes = [getattr(call, "__code__", None) for call in calls]
        if any(frame.f_code in codes for frame, _ in frames):
            return False
    kind, (frame, line) = type(error), frames[-1]
    where = f"{kind.__module__}.{kind.__qualname__} {frame.f_code.co_filename}:{line}"
    digest = hashlib.sha256(where.encode()).digest()
    with contextlib.suppress(Exception):  # a rank may have ended
        return backend.fails_alike(int.from_bytes(digest[:6], "big"), _ALIKE_SECONDS)
    return False


def share(error: Exception | None, what: str, backend: Backend) -> Exception:
    """Return rank 0's error, so that every rank can raise it; every rank calls it.

    If it is not caught, rank 0 alone prints it.

    Returns:
        On rank 0 the error itself; on other ranks a copy, or a ``CollectiveError`` with its
        text if it cannot be copied.
    """
    return shared(broadcast_object(backend, sent(error, what)), error, backend)


def sent(error: Exception | None, what: str) -> tuple[bytes, str]:
    """Return an error in a form that other ranks can read; empty without one."""
    if error is None:
        return b"", ""
    text = f"{what} raised {type(error).__name__}: {error}"
    try:
        pickle.loads(data := pickle.dumps(error))
    except Exception:
        data = b""
    return data, text


def shared(
    received: tuple[bytes, str], error: Exception | None, backend: Backend
) -> Exception:
    """Return what ``share`` returns.

    Args:
        received: What rank 0 has ``sent``.
        error: That of rank 0 there; None elsewhere.
    """
    data, text = received
    if error is None:
        try:
            error = pickle.loads(data)
        except Exception:
            error = CollectiveError(f"rank 0: {text}", hint="see what rank 0 printed")
        assert error is not None
        _when_uncaught(error, lambda: None, prints=False)
    else:
        description = _description(backend.rank, error)
        _when_uncaught(error, lambda: recorder.request_dump(description), prints=True)
    _shared[:] = [error]
    return error


def _when_uncaught(
    error: BaseException, action: Callable[[], None], prints: bool
) -> None:
    """Have the interpreter call ``action`` if the error is not caught."""
    printing = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        if value is error:
            action()
        if value is not error or prints:
            printing(kind, value, trace)

    vars(hook)["wraps"] = printing
    sys.excepthook = hook


def own_excepthook() -> Callable[[type[BaseException], BaseException, Any], Any] | None:
    """Return the ``sys.excepthook`` that the script has set, if it has set one."""
    hook: Any = sys.excepthook
    while found := getattr(hook, "wraps", None):
        hook = found
    return None if hook in (sys.__excepthook__, _HOOK_AT_START) else hook


def _description(rank: int, error: BaseException) -> str:
    file, line, *_ = traceback.extract_tb(error.__traceback__)[-1]
    return f"rank {rank} failed: {type(error).__name__} at {file}:{line}\n{error}"


@contextlib.contextmanager
def guarded(backend: Backend) -> Iterator[None]:
    """Surround a public call: its errors are explained, and end all ranks."""
    with (
        ends_the_job(backend),
        arguments_named(),
        backend.explained(),
        _explaining_memory(),
    ):
        yield


@contextlib.contextmanager
def _explaining_memory() -> Iterator[None]:
    """Add a remedy to errors about memory."""
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
