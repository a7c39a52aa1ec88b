"""A rank under mpirun reports to its supervisor since when it waits.

On one host the ranks of ``native`` end a rank that hangs. Across hosts, and with
``mpi``, they cannot. So each rank writes into memory of its supervisor
(``collective.launch.rank``) when it begins and when it stops to wait for others.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import time
from collections.abc import Iterator

from collective.elastic import membership_file

VARIABLE = "COLLECTIVE_WAITS"
# Nanoseconds of the monotonic clock: when the present wait began, or 0; when the last
# one ended.
_LAYOUT = struct.Struct("qq")
_AT = len(membership_file.HEADER)


class WaitReport:
    """The supervisor's side.

    Attributes:
        path: The path by which the rank finds it: the value of ``VARIABLE``.
    """

    def __init__(self) -> None:
        file, self.path = membership_file.new_memory("collective waits", _LAYOUT.size)
        self._memory = mmap.mmap(file, _AT + _LAYOUT.size)
        _LAYOUT.pack_into(self._memory, _AT, 0, time.monotonic_ns())

    def waits(self) -> float:
        """Return for how many seconds the rank has waited; 0 if it does not wait."""
        since, _ = _LAYOUT.unpack_from(self._memory, _AT)
        return (time.monotonic_ns() - since) / 1e9 if since else 0.0

    def works(self) -> float:
        """Return for how many seconds the rank has not waited; 0 if it waits."""
        since, last = _LAYOUT.unpack_from(self._memory, _AT)
        return 0.0 if since else (time.monotonic_ns() - last) / 1e9


@contextlib.contextmanager
def reported_wait() -> Iterator[None]:
    """Report a wait for other ranks while this context is entered."""
    memory = _memory(os.environ.get(VARIABLE, ""))
    if memory is not None:
        _LAYOUT.pack_into(memory, _AT, time.monotonic_ns(), 0)
    try:
        yield
    finally:
        if memory is not None:
            _LAYOUT.pack_into(memory, _AT, 0, time.monotonic_ns())


@functools.cache
def _memory(value: str) -> mmap.mmap | None:
    with contextlib.suppress(OSError):
        file = membership_file.open_memory(value)
        try:
            return mmap.mmap(file, _AT + _LAYOUT.size)
        finally:
            os.close(file)
    return None
