"""How a weight of a tensor-parallel layer is cut into shards, one for each rank, and gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.backends.tensor_group import TensorGroup
from collective.training.input.plan import share


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
