"""Random graphs of tensors of unlike lengths.

All tensors have four columns, and any number of rows: that of the batch, fewer, more, or
none. Whatever a step does is defined for any of them, so steps can follow each other in
any order: cuts, joins, other orders, products with weights, broadcasts by 1, branches,
loops, lists, effects, and tensors of whose rank nothing is known.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import tensorflow as tf

WIDTH = 4
Step = Callable[[Any, tf.Tensor, tf.Tensor], tf.Tensor]
_NOWHERE = f"file://{os.devnull}"


class _Draws(random.Random):
    """What a graph is drawn from, and the variable that it writes."""

    def __init__(self, seed: int, state: tf.Variable):
        super().__init__(seed)
        self.state = state


_ANY = tf.TensorShape([None, WIDTH])


def _tamed(x: tf.Tensor) -> tf.Tensor:
    """Numbers between -1 and 1: what is not finite becomes 0."""
    return tf.tanh(tf.where(tf.math.is_finite(x), x, tf.zeros_like(x)))


def _attended(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    scores = tf.einsum("...qd,...kd->...qk", a[None], b[None])
    return tf.einsum("...qk,...kd->...qd", tf.nn.softmax(scores), b[None])[0]


def _unknown(x: tf.Tensor) -> tf.Tensor:
    """The same, of unknown rank; a gradient passes."""

    @tf.custom_gradient
    def function(x: tf.Tensor) -> Any:
        return tf.numpy_function(lambda a: a, [x], x.dtype), lambda slope: slope

    return function(x)


def _weights(columns: int) -> tf.Tensor:
    """A matrix that follows from no rows: a product with it may be shared out."""
    return tf.reshape(
        tf.cos(tf.range(WIDTH * columns, dtype=tf.float64)), [-1, columns]
    )


def _network(a: tf.Tensor) -> tf.Tensor:
    inner = tf.tanh(a @ tf.cast(_weights(6), a.dtype))
    return inner @ tf.transpose(tf.cast(_weights(6), a.dtype))


def _in_segments(of: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    return lambda a, b: of(a, tf.range(tf.shape(a)[0]) // 2)


_PLAIN: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "scaled": lambda a, b: a * 0.7 + 0.1,
    "centred": lambda a, b: a - tf.reduce_mean(a, 0),
    "by a sum": lambda a, b: a / (1.0 + tf.reduce_sum(tf.square(b), 0)),
    "by one row": lambda a, b: a * tf.reduce_max(b, 0, keepdims=True),
    "by a first row": lambda a, b: a + tf.reduce_sum(b[:1], 0, keepdims=True),
    "cumsum": lambda a, b: tf.cumsum(a),
    "reversed": lambda a, b: a[::-1],
    "turned round": lambda a, b: tf.reverse(a, [0]),
    "rolled": lambda a, b: tf.roll(a, 1, 0) - tf.roll(b, -2, 0)[:1],
    "product of rows": lambda a, b: tf.math.cumprod(a, 0, exclusive=True),
    "sum of the rest": lambda a, b: tf.cumsum(a, 0, exclusive=True, reverse=True),
    "largest so far": lambda a, b: tf.math.cumulative_logsumexp(a, 0),
    "sorted": lambda a, b: tf.sort(a, 0),
    "shuffled": lambda a, b: tf.gather(
        a, tf.argsort(tf.random.stateless_uniform(tf.shape(a)[:1], [1, 2]))
    ),
    "network": lambda a, b: _network(a),
    "one network for two": lambda a, b: _network(a) - tf.reduce_sum(_network(b), 0),
    "product": lambda a, b: a @ tf.matmul(b, b, transpose_a=True),
    "attended": _attended,
    "by norms": lambda a, b: tf.math.l2_normalize(a, 0),
    "sum of all": lambda a, b: a + tf.reduce_sum(b) * 0.01,
    "large": lambda a, b: a * (tf.reduce_sum(b - b, 0) * 1e300),
    "infinite": lambda a, b: a + tf.reduce_sum(b, 0) / tf.reduce_sum(b - b, 0),
}
_CUTS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "[:2]": lambda a, b: a[:2],
    "[1:]": lambda a, b: a[1:],
    "[-2:]": lambda a, b: a[-2:],
    "[::2]": lambda a, b: a[::2],
    "[1::3]": lambda a, b: a[1::3],
    "[::-2]": lambda a, b: a[::-2],
    "network of [1:]": lambda a, b: _network(a[1:]),
    "network of [::2]": lambda a, b: _network(a[::2]) * 2.0,
    "first half": lambda a, b: _network(a[: tf.shape(a)[0] // 2]),
    "second half": lambda a, b: _network(a[tf.shape(a)[0] // 2 :] + b[:1][:, :1] * 0),
    "halves": lambda a, b: _network(tf.split(tf.repeat(a, 2, 0), 2)[1]),
    "halves again": lambda a, b: tf.concat(
        [_network(half) for half in tf.split(tf.concat([a, a], 0), 2)], 0
    ),
    "neighbours": lambda a, b: _network(a[1:]) - _network(a[:-1]),
    "segments": _in_segments(tf.math.segment_sum),
    "means of segments": _in_segments(tf.math.segment_mean),
    "none": lambda a, b: tf.zeros([0, WIDTH], a.dtype),
    "one": lambda a, b: tf.reduce_sum(a, 0, keepdims=True),
    "mask": lambda a, b: tf.boolean_mask(a, a[:, 0] > 0.3),
    "half": lambda a, b: tf.gather(
        a, tf.math.top_k(a[:, 0], tf.shape(a)[0] // 2).indices
    ),
    "twice": lambda a, b: tf.concat([a, a * 0.5], 0),
    "joined": lambda a, b: tf.concat([a, b], 0),
    "joined by three": lambda a, b: tf.concat([b, tf.ones([3, WIDTH], a.dtype), a], 0),
    "repeated": lambda a, b: tf.repeat(a, 2, 0),
    "turned": lambda a, b: tf.transpose(tf.reshape(tf.transpose(a), [WIDTH, -1])),
}


def _simple(r: random.Random, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    table = r.choice([_PLAIN, _CUTS])
    return _tamed(table[r.choice(sorted(table))](a, b))


def _beside_unknown(r: random.Random, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    made = [_unknown(a), b] if r.random() < 0.5 else [b, _unknown(a)]
    return tf.ensure_shape(tf.concat(made, 0), _ANY)


def _effects(r: _Draws, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """What others see, and a variable that is written and read again."""
    state = r.state
    with tf.control_dependencies([tf.print(tf.shape(b), output_stream=_NOWHERE)]):
        state.assign(tf.cast(tf.reduce_sum(_simple(r, b, a), 0), state.dtype))
        return a + tf.cast(state.read_value(), a.dtype)


def _branches(r: random.Random, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    def branch(seed: float) -> tf.Tensor:
        made = _simple(random.Random(seed), a, b)
        # TensorFlow may take the length of one branch for that of all.
        return tf.raw_ops.PlaceholderWithDefault(input=made, shape=_ANY)

    seeds = [r.random() for _ in range(r.choice([2, 2, 3]))]
    functions = [lambda seed=seed: branch(seed) for seed in seeds]
    total = tf.reduce_sum(tf.abs(a)) * 10
    number = tf.cast(total, tf.int32) % len(seeds)
    if len(seeds) == 2:
        return tf.cond(number > 0, *functions)
    return tf.switch_case(number, functions)


def _loop(r: random.Random, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    seed, times = r.random(), r.choice([0, 1, 2])
    if r.random() < 0.3:
        times = tf.cast(tf.reduce_sum(tf.abs(b)) * 10, tf.int32) % 3

    def body(i: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> Any:
        return i + 1, _simple(random.Random(seed), x, y)[:20], y * 0.5

    shapes = (tf.TensorShape([]), _ANY, b.shape)
    return tf.while_loop(
        lambda i, *_: i < times, body, (tf.constant(0), a, b), shape_invariants=shapes
    )[1]


def _list(r: random.Random, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    made = tf.TensorArray(
        a.dtype, 3, infer_shape=False, element_shape=_ANY, clear_after_read=False
    )
    for place in range(3):
        made = made.write(place, _simple(r, a, b)[:20])
    if r.random() < 0.5:
        return made.concat()
    return tf.concat([made.read(2), made.read(0)], 0)


_STEPS: list[Step] = [
    _simple,
    _simple,
    _simple,
    _beside_unknown,
    _effects,
    _branches,
    _loop,
    _list,
]


def random_graph(seed: int, steps: int = 4) -> Callable[..., list[tf.Tensor]]:
    """Returns a function of tensors that have ``WIDTH`` columns.

    Args:
        seed: What the graph is drawn from.
        steps: How many random steps it has.
    """

    state = tf.Variable(tf.zeros([WIDTH], tf.float64))

    def function(*operands: tf.Tensor) -> list[tf.Tensor]:
        r = _Draws(seed, state)
        known = list(operands)
        for _ in range(steps):
            made = r.choice(_STEPS)(r, r.choice(known[-3:]), r.choice(known))
            # Lengths would grow from step to step.
            known.append(_tamed(made)[:40] if steps > 1 else _tamed(made))
        last = known[len(operands) :]
        return [last[-1], *(tf.reduce_sum(x, 0) for x in last[:-1])]

    return function
