"""Random numbers of a replica's own, for replicas whose rows are batches of their own.

Seeds and generators stay alike on all replicas, so their states need no exchange. What
differs is where a draw begins: TensorFlow's Philox counts with 128 bits, of which a draw
uses the lower 64; a replica has its number in the upper ones. Operations that hide the
counter have it in the seed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import (
    gen_random_index_shuffle_ops,
    gen_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)

from collective.replacements import replacing

# By the argument that is another on each replica.
_COUNTER = (
    "stateless_random_uniform_v2",
    "stateless_random_uniform_int_v2",
    "stateless_random_uniform_full_int_v2",
    "stateless_random_normal_v2",
    "stateless_truncated_normal_v2",
    "stateless_random_gamma_v3",
    "stateless_shuffle",
)
_SEED = {
    gen_stateless_random_ops: {
        "stateless_random_binomial": 1,
        "stateless_random_poisson": 1,
        "stateless_multinomial": 2,
    },
    gen_random_index_shuffle_ops: {"random_index_shuffle": 1},
}
_STATEFUL = (
    "random_uniform",
    "random_uniform_int",
    "random_standard_normal",
    "truncated_normal",
    "multinomial",
    "random_shuffle",
)


@contextlib.contextmanager
def draw_as_replica(replica: int) -> Iterator[None]:
    """Inside, TensorFlow's random operations draw numbers of a replica's own.

    Replica 0 draws those of one process.
    """
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            plain = getattr(owner, name)
            stack.enter_context(replacing(owner, name, make(plain)))

        counted = functools.partial(
            _moved, argument="counter", place=2, replica=replica
        )
        for name in _COUNTER:
            replace(gen_stateless_random_ops_v2, name, counted)
        for owner, names in _SEED.items():
            for name, place in names.items():
                make = functools.partial(
                    _moved, argument="seed", place=place, replica=replica
                )
                replace(owner, name, make)
        for name in _STATEFUL:
            replace(gen_random_ops, name, lambda plain: _seeded(plain, replica))
        yield


def _moved(plain: Any, argument: str, place: int, replica: int) -> Any:
    """An operation whose argument has the replica's number in its upper half."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        value = kwargs[argument] if argument in kwargs else given[place]
        value = tf.convert_to_tensor(value)
        upper = [replica if i == 1 else 0 for i in range(value.shape[0])]
        if value.dtype == tf.uint64:  # which not every device can add
            moved = tf.bitcast(value, tf.int64) + tf.constant(upper, tf.int64)
            value = tf.bitcast(moved, tf.uint64)
        else:
            moved = tf.cast(value, tf.int64) + tf.constant(upper, tf.int64)
            value = tf.cast(moved, value.dtype)
        if argument in kwargs:
            kwargs[argument] = value
        else:
            given[place] = value
        return plain(*given, **kwargs)

    return draw


def _seeded(plain: Any, replica: int) -> Any:
    """An operation that keeps a state, with a seed of the replica's own."""

    def draw(*args: Any, seed: int = 0, seed2: int = 0, **kwargs: Any) -> Any:
        if seed or seed2:  # else its numbers differ anyway
            seed2 += replica
        return plain(*args, seed=seed, seed2=seed2, **kwargs)

    return draw
