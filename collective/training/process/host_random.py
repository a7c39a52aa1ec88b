"""The global generators of Python and NumPy, which scripts draw from on every rank.

Data may draw from them, too, in threads that read ahead (``read_by``). While they do, nobody
can tell who has drawn a number, so no state is put back.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from collective.backends.base import Backend
from collective.training.process.object_collectives import broadcast_object

State = tuple[Any, ...]
_readers: weakref.WeakSet[object] = weakref.WeakSet()


def state() -> State:
    """Return the states of both generators."""
    return random.getstate(), np.random.get_state(legacy=True)


def set_state(new: State) -> None:
    """Continue from a ``state``."""
    random.setstate(new[0])
    np.random.set_state(new[1])


def read_by(data: object) -> None:
    """Mark data that may draw numbers as read, until they are closed or collected."""
    _readers.add(data)


def closed(data: object) -> None:
    """Note that data are not being read any more."""
    _readers.discard(data)


def is_read() -> bool:
    """Return whether data are being read that may draw numbers."""
    return bool(_readers)


def drawn_since(before: State) -> bool:
    """Return whether the caller has drawn since a ``state``; False if data may have."""
    now = state()
    pairs = zip(before[1], now[1], strict=True)
    same = before[0] == now[0] and all(np.array_equal(a, b) for a, b in pairs)
    return not (same or is_read())


def share(backend: Backend) -> None:
    """Give every rank the state of rank 0. Every rank calls it."""
    set_state(broadcast_object(backend, state()))


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Put the states back at the end, because other ranks do not draw these numbers."""
    before = state()
    try:
        yield
    finally:
        if not is_read():
            set_state(before)
