"""Standard streams that end no run, even if they are closed or their disk is full."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from collective.log import log


def open_streams() -> None:
    """Opens the standard streams that are closed, and lets them take any text.

    Otherwise the next pipe or file would get the descriptor of a closed stream.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does


def outlive_readers() -> None:
    """From now on, a failing standard output is one warning and not an exception.

    Hours of training must not be lost because the reader of a pipe has ended.
    """
    given = sys.stdout
    if given is not sys.__stdout__ or not isinstance(given, io.TextIOWrapper):
        return  # replaced, as in a notebook or a test
    given.flush()
    raw = _Lasting(given.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if given.write_through else io.BufferedWriter(raw),  # type: ignore[arg-type]
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
