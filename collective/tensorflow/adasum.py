"""Adasum: a sum that shrinks where gradients point the same way.

Of two gradients a and b it makes a (1 - a·b / 2|a|²) + b (1 - a·b / 2|b|²): their sum
where they are orthogonal, their mean where they are equal. Of more, in pairs, as in a
tournament. From Maleki et al., "Scaling Distributed Training with Adaptive Summation"
(2020).

Every rank gathers all tensors and plays the whole tournament: N times the memory of
the tensors, and the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from collective import tensorflow_ops
from collective.tensorflow.process_sets import ProcessSet, group_of


def adasum(
    tensors: Sequence[tf.Tensor], process_set: ProcessSet, name: str | None = None
) -> list[tf.Tensor]:
    """Adasum of each tensor over the ranks.

    Args:
        tensors: Floating-point, the same shapes and dtypes on every rank.
        process_set: The ranks that take part: 1, 2, 4, 8, ...
        name: Of the call.

    Returns:
        The results in order.

    Raises:
        NotImplementedError: If the number of ranks is no power of two.
    """
    size = process_set.size() or 1
    if size & (size - 1):
        raise NotImplementedError(
            "Running Adasum with non-power of 2 ranks is not supported yet.\n"
            "HINT: start 2, 4, 8, ... ranks, or use hvd.Average"
        )
    results = []
    for number, tensor in enumerate(tensors):
        everyone = tensorflow_ops.allgather(
            tf.reshape(tensor, [1, -1]),
            name and f"{name} {number}",
            group_of(process_set),
        )
        left = [everyone[rank] for rank in range(size)]
        while len(left) > 1:
            left = [_pair(a, b) for a, b in zip(left[::2], left[1::2], strict=True)]
        results.append(tf.reshape(left[0], tf.shape(tensor)))
    return results


def _pair(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Two vectors become one; the products are summed in float64."""
    wide_a, wide_b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    both = tf.reduce_sum(wide_a * wide_b)
    of_a = 1 - tf.math.divide_no_nan(both, 2 * tf.reduce_sum(wide_a * wide_a))
    of_b = 1 - tf.math.divide_no_nan(both, 2 * tf.reduce_sum(wide_b * wide_b))
    return tf.cast(of_a * wide_a + of_b * wide_b, a.dtype)
