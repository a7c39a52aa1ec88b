"""What rank 0 alone reads and writes of parts, while the other ranks take part in it.

It takes all ranks to read a whole value, or to write one. Code that runs on rank 0 alone, as a
callback or what writes a file, announces each such use; the others ``serve`` it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import tensorflow as tf


class Part(Protocol):
    """What holds a part of a variable."""

    number: int
    shape: tuple[int, ...]
    part: tf.Variable

    def gather(self) -> tf.Tensor:
        """Return the whole value; every rank calls it."""
        ...

    def write(self, value: tf.Tensor) -> None:
        """Keep this rank's part of rank 0's value; every rank calls it."""
        ...


#: Takes the number of a use; inside, the other ranks serve it.
Announce = Callable[[int], AbstractContextManager[None]]
#: The number of no use.
NONE = 0

# The ranks make parts in the same order, so a number means the same variable on all.
_numbers = itertools.count()
_parts: WeakValueDictionary[int, Any] = WeakValueDictionary()
_announce: Announce | None = None


def numbered(part: Part) -> int:
    """Return the number of a new part, the same on every rank."""
    number = next(_numbers)
    _parts[number] = part
    return number


@contextlib.contextmanager
def alone(announce: Announce) -> Iterator[None]:
    """Inside, this rank runs alone, and announces what it uses of parts."""
    global _announce
    before, _announce = _announce, announce
    try:
        yield
    finally:
        _announce = before


def is_alone() -> bool:
    """Return whether the other ranks wait for what this one announces."""
    return _announce is not None


@contextlib.contextmanager
def using(part: Part, writes: bool) -> Iterator[None]:
    """Inside, every rank uses a part: the others do so too if this one runs alone."""
    if _announce is None:
        yield
        return
    with _announce(1 + 2 * part.number + writes):
        yield


def serve(use: int) -> None:
    """Take part in a use that rank 0 has announced."""
    number, writes = divmod(use - 1, 2)
    part = _parts[number]
    if writes:  # rank 0's value counts
        part.write(tf.zeros(part.shape, part.part.dtype))
    else:
        part.gather()
