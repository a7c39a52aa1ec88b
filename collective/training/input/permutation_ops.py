"""The permutation of ``collective.training.input.permutation``, as operations of a graph.

Keras' adapter of arrays makes the order of an epoch within ``tf.data``, where no function of
Python should run: its threads would wait for the interpreter when the process ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from collective.training.input import permutation


def permuted(n: int, seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Return ``permutation.permute`` of all places: int64 ``[n]``.

    Args:
        n: Length of the permutation, from 1 up.
        seed: Together with the epoch, the key.
        epoch: int64 scalar, from 0.
    """
    base = _derived(_number(permutation.derive(seed)), tf.cast(epoch, tf.uint64))
    start = _derived(_number(0), base)
    keys = [_derived(start, _number(i)) for i in range(permutation.ROUNDS)]
    left_size = math.isqrt(n - 1) + 1
    right_size = -(-n // left_size)

    def encipher(values: tf.Tensor) -> tf.Tensor:
        left, right = values % _number(left_size), values // _number(left_size)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = _add_hash(left, right, left_size, key)
            else:
                right = _add_hash(right, left, right_size, key)
        return left + right * _number(left_size)

    def walk(values: tf.Tensor) -> Sequence[tf.Tensor]:
        return [tf.where(_at_least(values, n), encipher(values), values)]

    first = encipher(tf.cast(tf.range(n, dtype=tf.int64), tf.uint64))
    (found,) = tf.while_loop(
        lambda values: tf.reduce_any(_at_least(values, n)), walk, [first]
    )
    return tf.cast(found, tf.int64)


def _number(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)


def _at_least(values: tf.Tensor, n: int) -> tf.Tensor:
    """Return which values are ``n`` or more; all are below 2**62."""
    return tf.cast(values, tf.int64) >= n


def _shifted(value: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(value, tf.fill(tf.shape(value), _number(bits)))


def _hashed(value: tf.Tensor) -> tf.Tensor:
    """Compute ``permutation.hash64``."""
    value = tf.bitwise.bitwise_xor(value, _shifted(value, 30))
    value *= _number(permutation.MULTIPLY_1)
    value = tf.bitwise.bitwise_xor(value, _shifted(value, 27))
    value *= _number(permutation.MULTIPLY_2)
    return tf.bitwise.bitwise_xor(value, _shifted(value, 31))


def _derived(key: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Continue ``permutation.derive`` with one more number."""
    return _hashed(tf.bitwise.bitwise_xor(key, number) + _number(permutation.GOLDEN))


def _add_hash(
    half: tf.Tensor, other: tf.Tensor, size: int, key: tf.Tensor
) -> tf.Tensor:
    hashed = _hashed(other * _number(permutation.GOLDEN) + key)
    moved = half + _shifted(_shifted(hashed, 32) * _number(size), 32)
    return tf.where(_at_least(moved, size), moved - _number(size), moved)
