"""How a variable is cut into shards, one for each rank, and gathered again.

Both kinds of shard know the ``shape`` of the whole variable, ``cut`` this rank's shard out
of a whole value and, called by every rank outside ``run``, ``gather`` the whole value.

``FlatShard`` cuts a variable as a flat vector: the optimizer's state, which is updated
element by element. ``AxisShard`` cuts along one axis: the weights of a tensor-parallel
layer, which multiplies with its shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.tensor_group import TensorGroup
from collective.training.input.plan import share


class AxisShard:
    """Contiguous slices along one axis; their lengths differ by one at most.

    Args:
        shape: Of the whole variable.
        axis: That is cut.
        group: The ranks that have the shards.
    """

    def __init__(self, shape: Sequence[int], axis: int, group: TensorGroup):
        self.shape = tuple(shape)
        self.axis = axis
        self.group = group

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Of this rank's shard."""
        start, stop = self._bounds
        return (*self.shape[: self.axis], stop - start, *self.shape[self.axis + 1 :])

    def cut(self, whole: Any) -> Any:
        """This rank's slice."""
        return whole[(slice(None),) * self.axis + (slice(*self._bounds),)]

    def gather(self, shard: Any) -> np.ndarray:
        """The slices of the group, concatenated."""
        return self.group.gathered(np.asarray(shard), self.axis)

    @property
    def _bounds(self) -> tuple[int, int]:
        return share(self.shape[self.axis], self.group.part, self.group.parts)


class FlatShard:
    """Equal pieces of the flat variable; the last one is padded with zeros.

    Args:
        shape: Of the whole variable.
        backend: One with a replica in each process.
        all_gather: ``Backend.all_gather``, to be called outside ``run``.
    """

    def __init__(
        self,
        shape: Sequence[int],
        backend: Backend,
        all_gather: Callable[[tf.Tensor], tf.Tensor],
    ):
        self.shape = tuple(shape)
        self.backend = backend
        self._all_gather = all_gather

    @property
    def length(self) -> int:
        """Elements of a shard."""
        return -(-math.prod(self.shape) // self.backend.replicas)

    def cut(self, whole: Any) -> tf.Tensor:
        """This rank's piece: ``[length]``."""
        return self.cut_for(tf.convert_to_tensor(whole), self.backend.rank)

    def cut_for(self, whole: tf.Tensor, rank: Any) -> tf.Tensor:
        """A row of ``rows``, without computing the others."""
        length = self.length
        own = tf.reshape(whole, [-1])[rank * length : (rank + 1) * length]
        return tf.ensure_shape(tf.pad(own, [[0, length - tf.shape(own)[0]]]), [length])

    def rows(self, whole: tf.Tensor) -> tf.Tensor:
        """The shards of all ranks: ``[replicas, length]``."""
        ranks, length = self.backend.replicas, self.length
        padding = length * ranks - math.prod(self.shape)
        flat = tf.pad(tf.reshape(whole, [-1]), [[0, padding]])
        return tf.reshape(flat, [ranks, length])

    def join(self, rows: tf.Tensor) -> tf.Tensor:
        """The inverse of ``rows``."""
        flat = tf.reshape(rows, [-1])[: math.prod(self.shape)]
        return tf.reshape(flat, self.shape)

    def gather(self, shard: Any) -> tf.Tensor:
        """The pieces of all ranks, joined."""
        return self.join(self._all_gather(tf.convert_to_tensor(shard)))


Shard = AxisShard | FlatShard
