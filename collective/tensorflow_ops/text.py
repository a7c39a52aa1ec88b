"""Text over ranks: it travels as numbers, because no backend gathers strings."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def gather_strings(
    strings: tf.Tensor, gather: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Return the strings ``[n, ...]`` of all ranks, by their lengths and bytes.

    Args:
        gather: Gathers numbers ``[n]`` along the first axis; called twice, in order.
    """
    flat = tf.reshape(strings, [-1])
    lengths = gather(tf.strings.length(flat))
    with tf.control_dependencies([lengths]):
        data = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
        data = tf.cast(gather(data), tf.int32)
    letters = tf.gather(tf.constant([bytes([i]) for i in range(256)]), data)
    words = tf.RaggedTensor.from_row_lengths(letters, lengths, validate=False)
    joined = tf.strings.reduce_join(words, axis=1)
    shape = tf.concat([[-1], tf.shape(strings)[1:]], 0)
    return tf.ensure_shape(tf.reshape(joined, shape), [None, *strings.shape[1:]])
