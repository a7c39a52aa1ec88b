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

from collective import tensorflow_ops, tensorflow_rank_info
from collective.tensorflow.process_sets import ProcessSet, group_of

ODD = (
    "Running Adasum with non-power of 2 ranks is not supported yet.\n"
    "HINT: start 2, 4, 8, ... ranks, or use hvd.Average"
)


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
        NotImplementedError: If the number of ranks is no power of two; in a graph
            ``tf.errors.InvalidArgumentError``, when it runs.
    """
    group = group_of(process_set)
    size = tensorflow_rank_info.size(group)
    power_of_two = tf.equal(tf.bitwise.bitwise_and(size, size - 1), 0)
    if tf.executing_eagerly() and not power_of_two:
        raise NotImplementedError(ODD)
    results = []
    with tf.control_dependencies([tf.debugging.Assert(power_of_two, [ODD])]):
        for number, tensor in enumerate(tensors):
            everyone = tensorflow_ops.allgather(
                tf.reshape(tensor, [1, -1]), name and f"{name} {number}", group
            )
            results.append(tf.reshape(_tournament(everyone), tf.shape(tensor)))
    return results


def _tournament(left: tf.Tensor) -> tf.Tensor:
    """``[ranks, n]`` becomes ``[1, n]``, in rounds that halve the number of rows."""
    (winner,) = tf.while_loop(
        lambda left: tf.shape(left)[0] > 1,
        lambda left: (_pairs(left[::2], left[1::2]),),
        (left,),
        (tf.TensorShape([None, left.shape[1]]),),
    )
    return winner


def _pairs(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Of two ``[pairs, n]``, one; the products are summed in float64."""

    def product(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x * y, axis=1, keepdims=True)

    wide_a, wide_b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    both = product(wide_a, wide_b)
    of_a = 1 - tf.math.divide_no_nan(both, 2 * product(wide_a, wide_a))
    of_b = 1 - tf.math.divide_no_nan(both, 2 * product(wide_b, wide_b))
    return tf.cast(of_a * wide_a + of_b * wide_b, a.dtype)
