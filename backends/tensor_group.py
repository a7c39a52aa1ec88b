"""Ranks that hold one replica together, each with a shard of its large layers.

T neighbours of the N ranks are a group: rank r has shard ``r % T`` of replica
``r // T``. All ranks of a group read the same rows. Between two large layers each
computes the same values; within one, each computes with its shard. These mappings lead
from one to the other, each with the gradient that makes the group one model:

    mapping                               forward                backward
    copy_to_tensor_parallel_region        identity               sum over the group
    reduce_from_tensor_parallel_region    sum over the group     identity
    scatter_to_tensor_parallel_region     this rank's shard      shards joined
    gather_from_tensor_parallel_region    shards joined          this rank's shard

Source: M. Shoeybi et al., Megatron-LM, 2019 (the first two are its f and g).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import tensorflow as tf

import collective
from collective.errors import UsageError
from collective.operations.kinds import Sum

MOST_SETS = 63  # of the core's process sets in a job

_current: ContextVar[TensorGroup | None] = ContextVar("tensor_group", default=None)
_numbers: set[int] = set()  # of the process sets of this process' groups


def current() -> TensorGroup | None:
    """Return the group that splits the layers built now; None: they are whole."""
    return _current.get()


def is_group(process_set: int) -> bool:
    """Return whether a process set is a group of ranks that hold one replica."""
    return process_set in _numbers


class TensorGroup:
    """This rank's group, and the ranks that hold the same shard of other replicas.

    Args:
        rank, size: This rank's place in the job, which it has joined. Every rank makes
            its group at the same time.
        parts: Ranks of a group.
        require_all_ranks: Called before each collective; raises if it must not run.

    Attributes:
        part, parts: This rank's number within its group, and the size of the group.
        within: The group.
        across: The ranks of all groups that have the same shard.

    Raises:
        UsageError: ``parts`` does not divide the ranks, or the ranks are too many.
    """

    def __init__(
        self, rank: int, size: int, parts: int, require_all_ranks: Callable[[], None]
    ):
        from collective import tensorflow_ops

        if size % parts:
            raise UsageError(
                f"{size} ranks cannot be cut into groups of {parts} (tensor_parallel)",
                hint=f"a number of ranks that {parts} divides, as -np {-(-size // parts) * parts}",
            )
        if parts + size // parts > MOST_SETS:
            raise UsageError(
                f"{size} ranks in groups of {parts} make more than {MOST_SETS} process "
                "sets, and a job has no more",
                hint="tensor_parallel nearer to the square root of the ranks",
            )
        self._ops = tensorflow_ops
        self._require_all_ranks = require_all_ranks
        self.part, self.parts = rank % parts, parts
        groups = [
            collective.ProcessSet(range(first, first + parts))
            for first in range(0, size, parts)
        ]
        alike = [
            collective.ProcessSet(range(part, size, parts)) for part in range(parts)
        ]
        self.within, self.across = groups[rank // parts], alike[self.part]
        _numbers.add(self.within.number)

    @contextlib.contextmanager
    def for_layers(self) -> Iterator[None]:
        """Split the layers that are built inside over this group."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the sum over the group; without a gradient."""
        self._require_all_ranks()
        (total,) = self._ops.all_reduce([tensor], Sum, process_set=self.within)
        return total

    def of_first(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor of the group's first rank; without a gradient."""
        self._require_all_ranks()
        root = self.within.ranks[0]
        (found,) = self._ops.broadcast([tensor], root, process_set=self.within)
        return found

    def by_rank(self, rows: tf.Tensor) -> tf.Tensor:
        """Return each rank's ``[replicas, n]`` as one ``[ranks, n]``."""
        by_rank = tf.reshape(self._side_by_side(rows), [-1, rows.shape[1]])
        return tf.ensure_shape(by_rank, [rows.shape[0] * self.parts, rows.shape[1]])

    def gathered(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Return the arrays of the group, joined along an axis, outside ``run``."""
        self._require_all_ranks()
        first = np.ascontiguousarray(np.moveaxis(array, axis, 0))
        whole = collective.allgather(first, process_set=self.within)
        return np.ascontiguousarray(np.moveaxis(whole, 0, axis))

    def follow(self, array: np.ndarray) -> np.ndarray:
        """Return the array of replica 0's rank with the same shard, outside ``run``."""
        self._require_all_ranks()
        array = np.array(array, order="C")
        if array.size:
            whole = array.reshape(-1).view(np.uint8)
            root = self.across.ranks[0]
            collective.broadcast(whole, root, out=whole, process_set=self.across)
        return array

    def copy_to_tensor_parallel_region(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a value that is equal on all ranks, for use with shards."""
        return _mapped(tensor, tf.identity, self.all_reduce)

    def reduce_from_tensor_parallel_region(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the sum of the ranks' values, equal on all."""
        return _mapped(tensor, self.all_reduce, tf.identity)

    def scatter_to_tensor_parallel_region(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return this rank's shard of the last axis of a value equal on all ranks."""
        return _mapped(tensor, self._own, self._joined)

    def gather_from_tensor_parallel_region(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the shards of the last axis joined, equal on all ranks."""
        return _mapped(tensor, self._joined, self._own)

    def _own(self, tensor: tf.Tensor) -> tf.Tensor:
        length = tensor.shape[-1] // self.parts
        return tensor[..., self.part * length : (self.part + 1) * length]

    def _side_by_side(self, rows: tf.Tensor) -> tf.Tensor:
        """Turn each ``[k, n]`` into ``[k, parts, n]``."""
        self._require_all_ranks()
        found = self._ops.allgather(rows[None], process_set=self.within)
        found.set_shape([self.parts, *rows.shape])
        return tf.transpose(found, [1, 0, 2])

    def _joined(self, tensor: tf.Tensor) -> tf.Tensor:
        length = tensor.shape[-1]
        rows = self._side_by_side(tf.reshape(tensor, [-1, length]))
        shape = tf.concat([tf.shape(tensor)[:-1], [length * self.parts]], axis=0)
        whole = tf.reshape(rows, shape)
        whole.set_shape([*tensor.shape[:-1], length * self.parts])
        return whole


def _mapped(
    tensor: tf.Tensor, forward: Callable[[Any], Any], backward: Callable[[Any], Any]
) -> Any:
    return tf.custom_gradient(lambda x: (forward(x), backward))(tensor)
