"""Random numbers of a replica's own, for replicas whose rows are batches of their own.

Seeds and generators stay alike on all replicas, so that their states are never exchanged.
Only the beginning of a draw differs: TensorFlow's Philox counts with 128 bits, of which a
draw uses the lower 64, and a replica has its number in the upper ones. If an operation hides
the counter, the number is in its seed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import (
    gen_random_index_shuffle_ops,
    gen_stateless_random_ops,
    random_ops_util,
)

from collective.replacements import replacing

# Operations without a counter: their owner, their name, the place of their seed.
_BY_SEED = (
    (gen_stateless_random_ops, "stateless_random_binomial", 1),
    (gen_stateless_random_ops, "stateless_random_poisson", 1),
    (gen_stateless_random_ops, "stateless_multinomial", 2),
    (gen_random_index_shuffle_ops, "random_index_shuffle", 1),
)


@contextlib.contextmanager
def draw_as_replica(replica: int) -> Iterator[None]:
    """Have TensorFlow's random operations draw numbers of a replica's own.

    Replica 0 draws the same numbers as one process.
    """
    counters = random_ops_util.get_key_counter_alg
    of_generator = tf.random.Generator._prepare_key_counter
    seeds = random_seed.get_seed

    def get_key_counter_alg(*args: Any, **kwargs: Any) -> Any:
        key, counter, algorithm = counters(*args, **kwargs)
        return key, _moved(counter, replica), algorithm

    def prepare_key_counter(self: Any, shape: Any) -> Any:
        key, counter = of_generator(self, shape)
        return key, _moved(counter, replica)

    def get_seed(op_seed: Any) -> Any:  # of operations that keep a state
        seed, seed2 = seeds(op_seed)
        if seed or seed2:  # else its numbers differ anyway
            seed2 += replica
        return seed, seed2

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (random_ops_util, "get_key_counter_alg", get_key_counter_alg),
            (tf.random.Generator, "_prepare_key_counter", prepare_key_counter),
            (random_seed, "get_seed", get_seed),
        ):
            stack.enter_context(replacing(owner, name, value))
        for owner, name, place in _BY_SEED:
            draw = functools.partial(_draw, getattr(owner, name), place, replica)
            stack.enter_context(replacing(owner, name, draw))
        yield


def _draw(plain: Any, place: int, replica: int, *args: Any, **kwargs: Any) -> Any:
    """Call an operation with the replica's number in the upper half of its seed."""
    given = list(args)
    if "seed" in kwargs:
        kwargs["seed"] = _moved(kwargs["seed"], replica)
    else:
        given[place] = _moved(given[place], replica)
    return plain(*given, **kwargs)


def _moved(value: tf.Tensor, replica: int) -> tf.Tensor:
    """Return a counter or seed with the replica's number added to its upper half."""
    value = tf.convert_to_tensor(value)
    upper = [replica if i == 1 else 0 for i in range(value.shape[0])]
    if value.dtype == tf.uint64:  # which not every device can add
        moved = tf.bitcast(value, tf.int64) + tf.constant(upper, tf.int64)
        return tf.bitcast(moved, tf.uint64)
    moved = tf.cast(value, tf.int64) + tf.constant(upper, tf.int64)
    return tf.cast(moved, value.dtype)
