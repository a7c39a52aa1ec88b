"""The global generators of Python and NumPy, which scripts draw from on every rank."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from collective.backends.base import Backend
from collective.training.exchange import broadcast_object

State = tuple[Any, ...]


def state() -> State:
    """The states of both generators."""
    return random.getstate(), np.random.get_state(legacy=True)


def set_state(new: State) -> None:
    """Continues from a ``state``."""
    random.setstate(new[0])
    np.random.set_state(new[1])


def differ(one: State, other: State) -> bool:
    """Whether something was drawn between two states."""
    pairs = zip(one[1], other[1], strict=True)
    return one[0] != other[0] or not all(np.array_equal(a, b) for a, b in pairs)


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
        set_state(before)
