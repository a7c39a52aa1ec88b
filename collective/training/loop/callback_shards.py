"""Methods of callbacks see whole variables, also of a model of which each rank has parts.

A method runs on rank 0. When it reads or writes a variable that the ranks hold in parts, rank 0
asks the other ranks, which wait for the end of the method, to take part. Of a tensor-parallel
model, all shards are gathered at the first read or write, and what the method has written is sent to
every rank when it ends. A method that touches none costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import numpy as np

from collective.backends.base import Backend
from collective.training.keras_compat.whole_variables import Values
from collective.training.model.prepared import get_partition
from collective.training.sharding import alone

_GATHER = -1.0  # in place of the number of a use: gather all shards


class CallbackShards:
    """The parts of a model, for the methods of its callbacks.

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
        with contextlib.ExitStack() as inside:
            if self.backend.size > 1:
                inside.enter_context(alone.alone(self._asking))
            if partition is None:
                yield
                return
            whole = inside.enter_context(partition.whole(self._gather))
            yield
            self._written = whole.written()

    @contextlib.contextmanager
    def _asking(self, what: float) -> Iterator[None]:
        """Have the other ranks take part in what this one does inside."""
        with self.backend.with_all_ranks():
            self.backend.broadcast_array(np.array([*[0.0] * self._flags, 0.0, what]))
            yield

    def _gather(self) -> Values:
        partition = get_partition(self.model)
        assert partition is not None
        if self.backend.size == 1:
            return partition.gather()
        with self._asking(_GATHER):
            return partition.gather()

    def agree(self, flags: np.ndarray) -> np.ndarray:
        """After a method: rank 0's flags, and its shards. Every rank calls it."""
        partition = get_partition(self.model)
        mine = np.array([*flags, float(bool(self._written)), float(alone.NONE)])
        while True:
            *agreed, wrote, asks = self.backend.broadcast_array(mine)
            if asks == alone.NONE:
                break
            if asks == _GATHER:
                assert partition is not None
                partition.gather()
            else:
                alone.serve(int(asks))
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
