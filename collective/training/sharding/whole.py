"""Variables of tensor-parallel layers: read, written and shown whole.

A checkpoint, a saved model and a user's callback know no shards. ``gather`` makes whole
values of them; inside ``whole`` the variables themselves are whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from collective.backends.base import Backend
from collective.training import keras_compat
from collective.training.keras_compat.whole_variables import Values, Whole
from collective.training.sharding.shards import AxisShard


class ShardedVariables:
    """The variables, among some, that are sharded over ranks.

    Args:
        variables: In an order that all ranks have.
        shards: By ``id`` of the variable.
    """

    def __init__(
        self,
        variables: Iterable[keras.Variable],
        shards: Mapping[int, AxisShard],
        backend: Backend,
    ):
        self.backend = backend
        self._shards = shards
        self._sharded = [v for v in variables if id(v) in shards]

    def shape_of(self, variable: keras.Variable) -> tuple[int, ...] | None:
        """Return the whole shape of a sharded variable, or None if it is not sharded."""
        shard = self._shards.get(id(variable))
        return None if shard is None else shard.shape

    def cut(self, variable: keras.Variable, value: np.ndarray) -> Any:
        """Return what this rank's variable holds of a whole value."""
        shard = self._shards.get(id(variable))
        return value if shard is None else shard.cut(value)

    def gather(self, everywhere: bool = False) -> dict[int, np.ndarray]:
        """Gather sharded variables on rank 0, whole, by ``id``. Every rank calls it.

        Args:
            everywhere: Whether every rank gets them.
        """
        found = {}
        for variable in self._sharded:
            whole = self._shards[id(variable)].gather(variable)
            if everywhere or self.backend.rank == 0:
                found[id(variable)] = np.asarray(whole)
        return found

    def put(self, values: Values) -> None:
        """Write this rank's shards of whole values."""
        for variable in self._sharded:
            if id(variable) in values:
                variable.assign(self.cut(variable, values[id(variable)]))

    def put_from_rank_zero(self, values: Values) -> None:
        """Write rank 0's whole values, on every rank. Every rank calls it."""
        has = np.array([float(id(v) in values) for v in self._sharded])
        changed = self.backend.broadcast_array(has)
        for variable, given in zip(self._sharded, changed, strict=True):
            if given:
                shape = self._shards[id(variable)].shape
                blank = np.zeros(shape, np.asarray(variable).dtype)
                whole = values.get(id(variable), blank)
                self.put({id(variable): self.backend.broadcast_array(whole)})

    @contextlib.contextmanager
    def whole(self, fetch: Callable[[], Values]) -> Iterator[Whole]:
        """Inside, the variables are whole on this rank.

        Args:
            fetch: Returns their values, as ``gather``; called when one is read or
                written.
        """
        shapes = [(v, self._shards[id(v)].shape) for v in self._sharded]
        with keras_compat.whole_variables.whole_variables(shapes, fetch) as whole:
            yield whole

    @contextlib.contextmanager
    def whole_shapes(self) -> Iterator[None]:
        """Inside, variables have whole shapes: to read whole values from a file."""
        shapes = [(v, self._shards[id(v)].shape) for v in self._sharded]
        with keras_compat.optimizers.replace_shapes(shapes):
            yield
