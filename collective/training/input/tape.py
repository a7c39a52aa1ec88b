"""Batches as they are read, epoch by epoch, of which the last few are kept.

A data set of unknown length can only be read on. What a training has to go back for is
near: the batch of a step that a rank did not survive, or the end of an epoch. What lies
ahead, after a resume, is read and left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

Place = tuple[int, int]
"""How many epochs have ended, and how many batches were read in all of them."""


class Tape(Generic[T]):
    """The batches of successive epochs.

    Args:
        read: The batches of the next epoch.
        keeps: How many batches and ends of epochs are kept.
    """

    def __init__(self, read: Callable[[], Iterator[T]], keeps: int):
        self.ended = False  # whether an epoch had no batch at all: none will have one
        self._events = _events(read)
        self._kept: deque[T | None] = deque(maxlen=keeps)
        self._again = 0  # how many of the kept ones come again
        self._batches = 0
        self._firsts = [0]  # the number of each epoch's first batch

    @property
    def place(self) -> Place:
        """Return where the tape is."""
        return len(self._firsts) - 1, self._batches

    @property
    def first(self) -> int:
        """Return the number of the current epoch's first batch, counted over all epochs."""
        return self._firsts[-1]

    def next(self) -> T | None:
        """Return the next batch, or None at the end of an epoch or of the data."""
        if self._again:
            event = self._kept[-self._again]
            self._again -= 1
        else:
            try:
                event = next(self._events)
            except StopIteration:
                self.ended = True
                return None
            self._kept.append(event)
        if event is None:
            self._firsts.append(self._batches)
        else:
            self._batches += 1
        return event

    def seek(self, place: Place) -> bool:
        """Move to a place; return False if it is not there, or too far back."""
        while self.place > place and self._again < len(self._kept):
            self._again += 1
            if self._kept[-self._again] is None:
                self._firsts.pop()
            else:
                self._batches -= 1
        while self.place < place and not self.ended:
            self.next()
        return self.place == place


def _events(read: Callable[[], Iterator[T]]) -> Iterator[T | None]:
    """Yield the batches of each epoch, and None at its end; end with an epoch without any."""
    had_any = False
    while True:
        count = 0
        for batch in read():
            count += 1
            yield batch
        if count:
            yield None
        elif not had_any:
            return
        # With steps_per_epoch=, a pass over the data may end with an epoch: the next
        # one is empty in Keras, and the one after it begins the next pass.
        had_any = count > 0
