"""Methods of callbacks see whole variables, also of a model of which each rank has shards.

A method runs on rank 0. When it reads or writes such a variable, rank 0 asks the other
ranks, which wait for the end of the method, to gather all of them; what it has written is
sent to every rank, which takes its shards. A method that touches none costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import numpy as np

from collective.backends.base import Backend
from collective.training.keras_compat.whole_variables import Values
from collective.training.model.prepared import get_partition


class CallbackShards:
    """The shards of a model, for the methods of its callbacks.

    Args:
        flags: How many numbers rank 0 sends after each method.
    """

    def __init__(self, model: keras.Model, backend: Backend, flags: int):
        self.model, self.backend, self._flags = model, backend, flags
        self._written: Values = {}

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Make variables whole for rank 0 while one of its methods runs."""
        partition = get_partition(self.model)
        self._written = {}
        if partition is None:
            yield
            return
        with partition.whole(self._gather) as whole:
            yield
            self._written = whole.written()

    def _gather(self) -> Values:
        partition = get_partition(self.model)
        assert partition is not None
        if self.backend.size == 1:
            return partition.gather()
        with self.backend.with_all_ranks():
            self.backend.broadcast_array(np.array([*[0.0] * self._flags, 0.0, 1.0]))
            return partition.gather()

    def agree(self, flags: np.ndarray) -> np.ndarray:
        """After a method: rank 0's flags, and its shards. Every rank calls it."""
        partition = get_partition(self.model)
        mine = np.array([*flags, float(bool(self._written)), 0.0])
        while True:
            *agreed, wrote, asks = self.backend.broadcast_array(mine)
            if not asks:
                break
            assert partition is not None
            partition.gather()
        if wrote:
            assert partition is not None
            partition.put_from_rank_zero(self._written)
            self._written = {}
        return np.array(agreed)

    def put(self) -> None:
        """After a method in a job of one process: takes what it has written."""
        if self._written:
            partition = get_partition(self.model)
            assert partition is not None
            partition.put(self._written)
            self._written = {}
