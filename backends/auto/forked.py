"""Calls a function in a fork, so that this process keeps no trace of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any


def in_a_fork(function: Callable[[], Any], seconds: float) -> Any | None:
    """Calls a function in a fork of this process.

    Only for a process whose TensorFlow has not started: a fork has none of its threads.

    Args:
        function: Its result must fit into JSON. Nothing it prints is seen.
        seconds: Its deadline.

    Returns:
        Its result; None if it raised, crashed or did not end in time.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of NumPy's BLAS
        child = os.fork()
    if child == 0:
        _answer(function, reader, writer)
    os.close(writer)
    try:
        text = _read(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    try:
        return json.loads(text)
    except ValueError:
        return None


def _answer(function: Callable[[], Any], reader: int, writer: int) -> None:
    """The fork: calls the function, writes the result and ends."""
    try:
        os.close(reader)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        with os.fdopen(writer, "w") as file:
            json.dump(function(), file)
    finally:
        os._exit(0)


def _read(reader: int, deadline: float) -> bytes:
    text = b""
    while True:
        left = max(0.0, deadline - time.monotonic())
        if not select.select([reader], [], [], left)[0]:
            return b""
        some = os.read(reader, 1 << 16)
        if not some:
            return text
        text += some
