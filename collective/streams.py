"""Standard streams that end no run: closed ones are opened, a full disk is told."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def open_streams() -> None:
    """Opens what a daemon has started us without; any text can be shown afterwards.

    Else a pipe or a file of ours would get the number of a stream that is closed.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does


def outlive_readers() -> None:
    """From now on standard output may fail, as where its reader ends: it is told once.

    Hours of training must not be lost for a line that nobody reads.
    """
    given = sys.stdout
    if given is not sys.__stdout__ or not isinstance(given, io.TextIOWrapper):
        return  # somebody else's, as a notebook's or a test's
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
            print(
                f"warning: standard output cannot be written to: {error.strerror}; "
                "what is printed from here on is lost",
                file=sys.stderr,
                flush=True,
            )
            return len(data)
