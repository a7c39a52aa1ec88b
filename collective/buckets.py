"""Groups tensors for transport: which of them travel together, and as one flat vector.

Every place that sends several tensors uses this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

# The default between hosts (docs/reference/measurements.md). On one host the ranks
# compute on the cores that would sum at the same time, so all gradients are one bucket.
BYTES_BETWEEN_HOSTS = 4 << 20
# TensorFlow takes over a NumPy array without a copy if it is aligned to so many bytes.
ALIGNMENT = 64


class Typed(Protocol):
    """A tensor of TensorFlow, an array of NumPy, or a variable of Keras."""

    @property
    def dtype(self) -> object:
        """Return the dtype, or its name."""

    @property
    def shape(self) -> Sequence[int]:
        """Return the shape."""


def in_buckets(tensors: Sequence[tf.Tensor], bytes_each: int | None) -> list[list[int]]:
    """Cut a list of gradients into buckets, from its end; return their indices.

    Back-propagation makes gradients in that order, so the first buckets can leave while
    it still runs. A bucket is closed once it has ``bytes_each`` bytes, or never if that
    is None. The tensors are TensorFlow's, with static shapes.
    """
    if bytes_each is None:
        return [list(range(len(tensors)))]
    buckets: list[list[int]] = [[]]
    filled = 0
    for index in reversed(range(len(tensors))):
        if filled >= bytes_each:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        count = tensors[index].shape.num_elements() or 0
        filled += count * tensors[index].dtype.size
    return buckets


def by_dtype(
    tensors: Sequence[Typed],
    indices: Sequence[int] | None = None,
    alone: float = math.inf,
) -> list[list[int]]:
    """Split tensors by dtype, for transports that send one dtype in a message.

    Args:
        tensors: Tensors of TensorFlow, NumPy or Keras with static shapes.
        indices: The tensors to split; all by default.
        alone: A tensor of at least so many elements gets a group of its own, so that it
            need not be copied into a vector with others.

    Returns:
        The indices of the tensors in each group, in order.
    """
    groups: dict[object, list[int]] = {}
    for index in range(len(tensors)) if indices is None else indices:
        tensor = tensors[index]
        # A dtype is a name in Keras and an object elsewhere.
        key = getattr(tensor.dtype, "name", tensor.dtype)
        if alone < math.inf and math.prod(tensor.shape) >= alone:
            key = index
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def reduce_flat(
    tensors: Sequence[tf.Tensor],
    reduce: Callable[[tf.Tensor], tf.Tensor],
    alone: float = math.inf,
    bytes_each: int | None = None,
) -> list[tf.Tensor]:
    """Reduce dense tensors of TensorFlow as one flat vector for each bucket and dtype.

    Args:
        tensors: Their shapes must be static if ``alone`` or ``bytes_each`` is set.
        reduce: Maps a vector to a vector of the same shape.
        alone: As for ``by_dtype``.
        bytes_each: As for ``in_buckets``; one bucket if None.
    """
    import tensorflow as tf

    out: list[tf.Tensor] = [None] * len(tensors)
    groups = (
        indices
        for bucket in in_buckets(tensors, bytes_each)
        for indices in by_dtype(tensors, bucket, alone)
    )
    for indices in groups:
        known = [tensors[i].shape.num_elements() for i in indices]
        sizes = [
            tf.size(tensors[i]) if size is None else size
            for i, size in zip(indices, known, strict=True)
        ]
        vector = tf.concat([tf.reshape(tensors[i], [-1]) for i in indices], axis=0)
        pieces = tf.split(reduce(vector), sizes)
        for i, piece in zip(indices, pieces, strict=True):
            out[i] = tf.reshape(piece, tf.shape(tensors[i]))
            out[i].set_shape(tensors[i].shape)
    return out


def reduce_arrays_flat(
    arrays: Sequence[np.ndarray], reduce: Callable[[np.ndarray], object]
) -> list[np.ndarray]:
    """Reduce NumPy arrays as one flat vector for each dtype, by ``reduce`` in place.

    The results are views of the vectors, aligned for TensorFlow.
    """
    out: list[np.ndarray] = [np.empty(0)] * len(arrays)
    for indices in by_dtype(arrays):
        dtype = arrays[indices[0]].dtype
        step = ALIGNMENT // dtype.itemsize
        starts = np.cumsum([0, *(-(-arrays[i].size // step) * step for i in indices)])
        vector = aligned_empty(int(starts[-1]), dtype)
        for i, start in zip(indices, starts, strict=False):
            view = vector[start : start + arrays[i].size]
            view[:] = arrays[i].reshape(-1)
            out[i] = view.reshape(arrays[i].shape)
        reduce(vector)
    return out


def aligned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised vector whose memory is aligned to ``ALIGNMENT`` bytes."""
    raw = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size * dtype.itemsize].view(dtype)
