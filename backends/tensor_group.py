"""Ranks that hold one replica together, each a part of its large layers.

Of N ranks, T neighbours are a group: rank r is part ``r % T`` of replica ``r // T``. All
of a group read the same rows. What they compute between two large layers is the same on
each; within one, each has its part, and they tell each other by these mappings, each
with the gradient that makes the group one model:

    mapping                                 forward              backward
    copy_to_tensor_parallel_region          as it is             sum over the group
    reduce_from_tensor_parallel_region      sum over the group   as it is
    scatter_to_tensor_parallel_region       one's own part       parts joined
    gather_from_tensor_parallel_region      parts joined         one's own part

Source: M. Shoeybi et al., Megatron-LM, 2019 (the first two are its f and g).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from collective.backends.base import Backend
from collective.errors import UsageError

MOST_SETS = 63  # of the core's process sets in a job

_current: ContextVar[TensorGroup | None] = ContextVar("tensor_group", default=None)


def current() -> TensorGroup | None:
    """The group for which layers are being made; None: they are whole."""
    return _current.get()


class TensorGroup:
    """This rank's group, and the ranks that hold the same part of other replicas.

    Args:
        backend: Has joined the job. Every rank makes its group at the same time.
        parts: Ranks of a group.

    Attributes:
        part, parts: This rank's number within its group, and how many they are.
        within: The group.
        across: The ranks of all groups that have the same part.

    Raises:
        UsageError: ``parts`` does not divide the ranks, or they are too many.
    """

    def __init__(self, backend: Backend, parts: int):
        from collective import ProcessSet

        rank, size = backend.rank, backend.size
        if size % parts:
            raise UsageError(
                f"{size} ranks cannot be cut into groups of {parts} (--tensor-parallel)",
                hint=f"a number of ranks that {parts} divides, as -np {-(-size // parts) * parts}",
            )
        if parts + size // parts > MOST_SETS:
            raise UsageError(
                f"{size} ranks in groups of {parts} make more than {MOST_SETS} process "
                "sets, and a job has no more",
                hint="--tensor-parallel nearer to the square root of the ranks",
            )
        self.backend = backend
        self.part, self.parts = rank % parts, parts
        groups = [
            ProcessSet(range(first, first + parts)) for first in range(0, size, parts)
        ]
        alike = [ProcessSet(range(part, size, parts)) for part in range(parts)]
        self.within, self.across = groups[rank // parts], alike[self.part]

    @contextlib.contextmanager
    def for_layers(self) -> Iterator[None]:
        """Inside, layers are made for this group."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def all_reduce(self, tensor: Any) -> Any:
        """The sum over the group; without a gradient."""
        from collective import tensorflow_ops

        self.backend.require_all_ranks()
        (total,) = tensorflow_ops.all_reduce([tensor], process_set=self.within)
        return total

    def all_gather(self, tensor: Any) -> Any:
        """``[n, ...]`` of each, one behind the other; n may differ. Without a gradient."""
        from collective import tensorflow_ops

        self.backend.require_all_ranks()
        return tensorflow_ops.allgather(tensor, process_set=self.within)

    def all_to_all(self, tensor: Any, splits: Any) -> tuple[Any, Any]:
        """Rows for each, and those from each with their numbers. Without a gradient."""
        from collective import tensorflow_ops

        self.backend.require_all_ranks()
        return tensorflow_ops.alltoall(tensor, splits, process_set=self.within)

    def by_rank(self, rows: Any) -> Any:
        """Of what each rank knows of all replicas: ``[replicas, n]`` to ``[ranks, n]``."""
        import tensorflow as tf

        by_rank = tf.reshape(self._side_by_side(rows), [-1, rows.shape[1]])
        return tf.ensure_shape(by_rank, [rows.shape[0] * self.parts, rows.shape[1]])

    def gathered(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Outside ``run``: the arrays of the group, joined along an axis."""
        import collective

        self.backend.require_all_ranks()
        first = np.ascontiguousarray(np.moveaxis(array, axis, 0))
        whole = collective.allgather(first, process_set=self.within)
        return np.ascontiguousarray(np.moveaxis(whole, 0, axis))

    def follow(self, array: np.ndarray) -> np.ndarray:
        """Outside ``run``: the array of the first replica's rank with the same part."""
        import collective

        self.backend.require_all_ranks()
        array = np.array(array, order="C")
        if array.size:
            whole = array.reshape(-1).view(np.uint8)
            root = self.across.ranks[0]
            collective.broadcast(whole, root, out=whole, process_set=self.across)
        return array

    def copy_to_tensor_parallel_region(self, tensor: Any) -> Any:
        """What all have alike, for use in parts."""
        import tensorflow as tf

        @tf.custom_gradient
        def mapping(x: Any) -> Any:
            return tf.identity(x), lambda upstream: self.all_reduce(upstream)

        return mapping(tensor)

    def reduce_from_tensor_parallel_region(self, tensor: Any) -> Any:
        """The sum of what each has, alike for all."""
        import tensorflow as tf

        @tf.custom_gradient
        def mapping(x: Any) -> Any:
            return self.all_reduce(x), tf.identity

        return mapping(tensor)

    def scatter_to_tensor_parallel_region(self, tensor: Any) -> Any:
        """Of what all have alike, one's own part of the last axis."""
        import tensorflow as tf

        @tf.custom_gradient
        def mapping(x: Any) -> Any:
            return self._own(x), self._joined

        return mapping(tensor)

    def gather_from_tensor_parallel_region(self, tensor: Any) -> Any:
        """Parts of the last axis made whole, alike for all."""
        import tensorflow as tf

        @tf.custom_gradient
        def mapping(x: Any) -> Any:
            return self._joined(x), self._own

        return mapping(tensor)

    def _own(self, tensor: Any) -> Any:
        length = tensor.shape[-1] // self.parts
        return tensor[..., self.part * length : (self.part + 1) * length]

    def _side_by_side(self, rows: Any) -> Any:
        """``[k, n]`` of each: ``[k, parts, n]``."""
        import tensorflow as tf

        return tf.transpose(self.all_gather(rows[None]), [1, 0, 2])

    def _joined(self, tensor: Any) -> Any:
        import tensorflow as tf

        length = tensor.shape[-1]
        rows = self._side_by_side(tf.reshape(tensor, [-1, length]))
        shape = tf.concat([tf.shape(tensor)[:-1], [length * self.parts]], axis=0)
        whole = tf.reshape(rows, shape)
        whole.set_shape([*tensor.shape[:-1], length * self.parts])
        return whole
