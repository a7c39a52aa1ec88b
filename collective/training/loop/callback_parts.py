"""Methods of callbacks see whole variables, also of a model of which each rank has parts.

A method runs on rank 0. When it reads or writes a variable that the ranks hold in parts, rank 0
asks the other ranks, which wait for the end of the method, to take part. A method that touches
none costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from collective.backends.base import Backend
from collective.training.sharding import alone


class CallbackParts:
    """The parts of variables, for methods of callbacks.

    Args:
        flags: How many numbers rank 0 sends after each method.
    """

    def __init__(self, backend: Backend, flags: int):
        self.backend, self._flags = backend, flags

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Make variables whole for rank 0 while one of its methods runs."""
        if self.backend.size == 1:
            yield
            return
        with alone.alone(self._asking):
            yield

    @contextlib.contextmanager
    def _asking(self, what: int) -> Iterator[None]:
        """Have the other ranks take part in what this one does inside."""
        with self.backend.with_all_ranks():
            self.backend.broadcast_array(np.array([*[0.0] * self._flags, float(what)]))
            yield

    def agree(self, flags: np.ndarray) -> np.ndarray:
        """Return rank 0's flags after a method, and serve what it asked for; every rank calls it."""
        mine = np.array([*flags, float(alone.NONE)])
        while True:
            *agreed, asks = self.backend.broadcast_array(mine)
            if asks == alone.NONE:
                return np.array(agreed)
            alone.serve(int(asks))
