"""What one process adds to a sum over ranks: the parts of its replicas, added up.

They are added as soon as they are made, one after the other, so that the part of a piece
of the rows is not kept until the last piece has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import tensorflow as tf

from collective.training.step import finite

#: By the kind of a partial value: the operation that makes it whole.
REDUCE = {
    "sum": tf.reduce_sum,
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "prod": tf.reduce_prod,
    "any": tf.reduce_any,
    "all": tf.reduce_all,
}
_NARROW = (tf.float16, tf.bfloat16, tf.float32)


class Own(NamedTuple):
    """What a process has of one value.

    Attributes:
        parts: One tensor for all replicas of the process. Or several: one for each device,
            or for each subtree of a tree; of other kinds than sums, one for each replica.
        dtype: That of the value. The tensors may have the dtype in which it travels.
        opens: What waits until it is sent, if it is sent in pieces.
    """

    parts: Sequence[tf.Tensor]
    dtype: tf.DType
    opens: Sequence[tf.Operation] = ()


def combined(kind: str, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the sum (maximum, ...) of the tensors of several replicas."""
    if len(parts) == 1:
        return parts[0]
    if kind == "sum":  # ``tf.add_n`` would wait for all parts
        return reduce(tf.add, parts)
    return REDUCE[kind](tf.stack(parts), 0)


def first_not_finite(values: Sequence[Own]) -> tf.Tensor:
    """Return which of some values is the first that is not finite, from 1; 0 for none."""
    numbers = [
        tf.add_n([tf.reduce_sum(t) for t in own.parts])
        if own.dtype.is_floating
        else tf.zeros([])
        for own in values
    ]
    return finite.first(numbers)


def carrier_of(dtype: tf.DType) -> tf.DType:
    """Return the dtype in which values of another travel exactly."""
    if dtype in _NARROW:
        return tf.float32
    if dtype.is_integer or dtype.is_bool:
        return tf.int64
    return {tf.complex64: tf.float32, tf.complex128: tf.float64}.get(dtype, dtype)


def carried(tensor: tf.Tensor, carrier: tf.DType) -> tf.Tensor:
    """Return a tensor in the dtype in which it travels."""
    if tensor.dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
    if tensor.dtype == tf.uint64:
        return tf.bitcast(tensor, tf.int64)
    return tf.cast(tensor, carrier)


def arrived(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return what has travelled in its own dtype."""
    if dtype.is_complex:
        return tf.complex(tensor[..., 0], tensor[..., 1])
    if dtype == tf.uint64:
        return tf.bitcast(tensor, tf.uint64)
    return tf.cast(tensor, dtype)
