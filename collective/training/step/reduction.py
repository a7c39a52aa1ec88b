"""Sums of many tensors in one all-reduce."""

from __future__ import annotations

import tensorflow as tf

from collective.backends.base import Backend

SMALL = 64  # elements; tensors up to this size are sent as one


def sum_tensors(
    backend: Backend, tensors: list[tf.Tensor], rounded: list[int]
) -> list[tf.Tensor]:
    """Sum tensors in one call; scalars and small vectors travel in one tensor.

    Args:
        tensors: The local sums, of one dtype.
        rounded: Places of the gradients, which may travel in 16 bits.
    """
    small = [i for i, t in enumerate(tensors) if is_small(t)]
    if not small:
        return list(backend.all_reduce(tensors, rounded))
    large = [i for i in range(len(tensors)) if i not in set(small)]
    flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in small], axis=0)
    head, *rest = backend.all_reduce(
        [flat, *(tensors[i] for i in large)],
        [1 + large.index(i) for i in rounded if i in large],
    )
    sizes = [tensors[i].shape.num_elements() for i in small]
    total = dict(zip(large, rest, strict=True))
    for i, piece in zip(small, tf.split(head, sizes), strict=True):
        total[i] = tf.reshape(piece, tensors[i].shape)
    return [total[i] for i in range(len(tensors))]


def is_small(tensor: tf.Tensor) -> bool:
    """Return whether a tensor is known to be small, so that it travels with others."""
    size = tensor.shape.num_elements()
    return size is not None and size <= SMALL
