"""The global generators of Python and NumPy, which scripts draw from on every rank.

Data may draw from them, too, in threads that read ahead (``read_by``): what is drawn then
cannot be distinguished, and nothing is put back.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from collective.backends.base import Backend
from collective.training.object_collectives import broadcast_object

State = tuple[Any, ...]
_readers: weakref.WeakSet[Any] = weakref.WeakSet()


def state() -> State:
    """The states of both generators."""
    return random.getstate(), np.random.get_state(legacy=True)


def set_state(new: State) -> None:
    """Continues from a ``state``."""
    random.setstate(new[0])
    np.random.set_state(new[1])


def read_by(data: object) -> None:
    """Marks that these data, which may draw numbers, are read until they are closed or collected."""
    _readers.add(data)


def closed(data: object) -> None:
    """These data are not read any more."""
    _readers.discard(data)


def is_read() -> bool:
    """Whether data are read that may draw."""
    return bool(_readers)


def drawn_since(before: State) -> bool:
    """Whether the caller has drawn since a ``state``; False where data may have."""
    now = state()
    pairs = zip(before[1], now[1], strict=True)
    same = before[0] == now[0] and all(np.array_equal(a, b) for a, b in pairs)
    return not (same or is_read())


def share(backend: Backend) -> None:
    """Gives every rank the state of rank 0. Every rank calls it."""
    set_state(broadcast_object(backend, state()))


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Puts the states back: what one rank alone draws, the others would miss."""
    before = state()
    try:
        yield
    finally:
        if not is_read():
            set_state(before)
