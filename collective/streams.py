"""Standard streams: a closed or full one ends no run; and whether a person reads."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

import psutil

from collective.log import log

_MPIRUNS = ("mpirun", "mpiexec", "prterun", "orterun")
_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


def open_streams() -> None:
    """Open the standard streams that are closed, and let them take any text.

    Otherwise the next pipe or file would get the descriptor of a closed stream.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does


def flush() -> None:
    """Write buffered output, before a process ends itself."""
    for stream in (sys.stdout, sys.stderr):
        with _may_be_closed():
            stream.flush()


def report(text: str) -> None:
    """Print an error to standard error, from code that must go on after it."""
    with _may_be_closed():
        print(text, file=sys.stderr, flush=True)


def _may_be_closed() -> contextlib.AbstractContextManager[None]:
    """Tolerate a stream that the script or its reader has closed."""
    return contextlib.suppress(AttributeError, ValueError, OSError)


def outlive_readers() -> None:
    """Turn errors of standard output into one warning, from now on.

    Hours of training must not be lost because the reader of a pipe has ended.
    """
    given = sys.stdout
    if given is not sys.__stdout__ or not isinstance(given, io.TextIOWrapper):
        return  # replaced, as in a notebook or a test
    given.flush()
    raw = _Lasting(given.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if given.write_through else io.BufferedWriter(raw),
        encoding=given.encoding,
        errors=given.errors,
        line_buffering=given.line_buffering,
        write_through=given.write_through,
    )


class _Lasting(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            log.warning(
                "standard output cannot be written: %s; further output is lost",
                error.strerror,
            )
            return len(data)


def is_terminal(stream: Any = None) -> bool:
    """Return whether a person reads the stream: standard output by default.

    Open MPI gives each rank a terminal of its own even if mpirun writes into a pipe or
    a file; then mpirun's own output counts.
    """
    stream = sys.stdout if stream is None else stream
    try:
        if not stream.isatty():
            return False
    except (AttributeError, ValueError):  # replaced, or closed
        return False
    return "OMPI_COMM_WORLD_RANK" not in os.environ or _mpirun_has_terminal()


def _mpirun_has_terminal() -> bool:
    """Return whether the mpirun that started this process has a terminal."""
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process().parents():
            if process.name() in _MPIRUNS:
                return os.readlink(f"/proc/{process.pid}/fd/1").startswith(_TERMINALS)
    return False
