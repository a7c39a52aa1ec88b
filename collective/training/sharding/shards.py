"""How a variable is cut into shards, one for each rank, and gathered again.

Both kinds of shard know the ``shape`` of the whole variable, ``cut`` this rank's shard out
of a whole value and, called by every rank outside ``run``, ``gather`` the whole value.

``FlatShard`` cuts a variable as a flat vector: the optimizer's state. ``AxisShard`` cuts along one axis: the weights of a tensor-parallel
layer, which multiplies with its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.backends.tensor_group import TensorGroup
from collective.training.input.plan import share
from collective.training.keras_compat.traced import traced
from collective.training.partition import pieces


class AxisShard:
    """Contiguous slices along one axis; their lengths differ by one at most.

    Args:
        shape: The shape of the whole variable.
        axis: That is cut.
        group: The ranks that have the shards.
    """

    def __init__(self, shape: Sequence[int], axis: int, group: TensorGroup):
        self.shape = tuple(shape)
        self.axis = axis
        self.group = group

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's shard."""
        start, stop = self._bounds
        return (*self.shape[: self.axis], stop - start, *self.shape[self.axis + 1 :])

    def cut(self, whole: Any) -> Any:
        """This rank's slice."""
        return whole[(slice(None),) * self.axis + (slice(*self._bounds),)]

    def gather(self, shard: Any) -> np.ndarray:
        """Return the slices of the group, concatenated."""
        return self.group.gathered(np.asarray(shard), self.axis)

    @property
    def _bounds(self) -> tuple[int, int]:
        return share(self.shape[self.axis], self.group.part, self.group.parts)


class Gather:
    """``Backend.gather_rows`` of pieces, outside ``run``.

    Args:
        backend: One with a replica in each process.
    """

    def __init__(self, backend: Backend):
        assert isinstance(backend, ShardCollectives)
        self.backend = backend
        self._by_dtype: dict[tf.DType, Any] = {}

    def __call__(self, piece: tf.Tensor) -> tf.Tensor:
        """Called by every rank."""
        backend = self.backend
        if piece.dtype not in self._by_dtype:
            self._by_dtype[piece.dtype] = traced(
                lambda own: backend.run(backend.gather_rows, (own,)),
                input_signature=[tf.TensorSpec([None], piece.dtype)],
            )
        return self._by_dtype[piece.dtype](piece)


class FlatShard:
    """Pieces of the flat variable; their lengths differ by one at most.

    Args:
        shape: The shape of the whole variable.
        gather: Of the backend.
    """

    def __init__(self, shape: Sequence[int], gather: Gather):
        self.shape = tuple(shape)
        self._gather = gather

    def cut(self, whole: Any) -> tf.Tensor:
        """This rank's piece: one axis."""
        backend = self._gather.backend
        return pieces.cut(whole, backend.rank, backend.size)

    def gather(self, shard: Any) -> tf.Tensor:
        """Return the pieces of all ranks, joined."""
        return tf.reshape(self._gather(tf.convert_to_tensor(shard)), self.shape)


Shard = AxisShard | FlatShard
