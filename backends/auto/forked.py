"""Calls a function in a fork, so that this process keeps no trace of it."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def in_a_fork(function: Callable[[], Any], seconds: float) -> Any | None:
    """Calls a function in a fork of this process.

    Only for a process whose TensorFlow has not started: a fork has none of its threads.

    Args:
        function: Its result must be picklable. Nothing it prints is seen.
        seconds: Its deadline.

    Returns:
        Its result; None if it raised, crashed or did not end in time.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(function, writer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of NumPy's BLAS
        child.start()
    writer.close()
    try:
        return reader.recv() if reader.poll(seconds) else None
    except EOFError:
        return None
    finally:
        child.kill()
        child.join()


def _answer(function: Callable[[], Any], writer: Connection) -> None:
    """The fork: calls the function, silently, and sends the result."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    writer.send(function())
