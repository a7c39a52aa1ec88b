"""Many tensors as one vector, for backends that pay for each message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def fused(tensors: list[Any], reduce: Callable[[Any], Any]) -> list[Any]:
    """Reduces tensors as one flat vector for each dtype.

    Args:
        tensors: Dense tensors with static shapes.
        reduce: Maps a vector to a vector of the same shape.

    Returns:
        The reduced tensors, in order.
    """
    import tensorflow as tf

    out: list[Any] = [None] * len(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        sizes = [tensors[i].shape.num_elements() for i in places]
        vector = tf.concat([tf.reshape(tensors[i], [-1]) for i in places], axis=0)
        pieces = tf.split(reduce(vector), sizes)
        for i, piece in zip(places, pieces, strict=True):
            out[i] = tf.reshape(piece, tensors[i].shape)
    return out
