"""Loops and branches; their functions are partitioned like the graph around them."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.training.partition.operands import (
    BLOCKS,
    Operands,
    below,
    check,
    generator,
    left_out,
    unit,
)


def _repeated(body: Any, times: Any = 3) -> Any:
    """Return a function that applies a body several times, in a loop of the graph."""

    def function(*x: tf.Tensor) -> Any:
        count = times(*x) if callable(times) else times
        return tf.while_loop(
            lambda i, *_: i < count,
            lambda i, *state: (i + 1, *body(*state)),
            (tf.constant(0), *x),
        )[1:]

    return function


def _collected(x: tf.Tensor, w: tf.Tensor) -> Any:
    """Return a loop that writes a list element in each step, and reads another list."""
    steps = tf.TensorArray(x.dtype, 3).unstack(tf.transpose(x, [1, 0, 2]))
    made = tf.TensorArray(x.dtype, 3)

    def body(i: tf.Tensor, state: tf.Tensor, made: tf.TensorArray) -> Any:
        state = tf.tanh(state @ w + steps.read(i))
        return i + 1, state, made.write(i, state * 2.0)

    zeros = tf.zeros([tf.shape(x)[0], 4], x.dtype)
    _, state, made = tf.while_loop(
        lambda i, *_: i < 3, body, (tf.constant(0), zeros, made)
    )
    return state, tf.transpose(made.stack(), [1, 0, 2])


def _means(x: tf.Tensor, w: tf.Tensor) -> Any:
    """Return a loop with a list of sums over the rows, and of values equal everywhere."""
    sums, same = tf.TensorArray(x.dtype, 3), tf.TensorArray(x.dtype, 3)

    def body(i: tf.Tensor, x: tf.Tensor, sums: Any, same: Any) -> Any:
        mean = tf.reduce_mean(x, 0)
        return i + 1, x - mean * 0.5, sums.write(i, mean), same.write(i, w * 2.0)

    _, x, sums, same = tf.while_loop(
        lambda i, *_: i < 3, body, (tf.constant(0), x, sums, same)
    )
    return x, sums.stack(), same.stack()


def _steps(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, [1, 0, 2])


_LOOPS: dict[str, Any] = {
    "by rows": _repeated(lambda x, w: (tf.tanh(x @ w), w)),
    "sums within": _repeated(lambda x, w: (x - tf.reduce_mean(x), w)),
    "a weight that learns": _repeated(
        lambda x, w: (x, w - 0.1 * tf.matmul(x[:, 0], x[:, 0] @ w, transpose_a=True))
    ),
    "both": _repeated(lambda x, w: (x @ w, w + tf.reduce_sum(x, [0, 1])), 2),
    "as often as numbers say": _repeated(
        lambda x, w: (x @ w, w * 0.5),
        lambda x, w: tf.cast(tf.reduce_sum(x[:, 0, 0]) * 10, tf.int32) % 4,
    ),
    "until a sum is small": lambda x, w: tf.while_loop(
        lambda x: tf.reduce_sum(x * x) > 0.5, lambda x: (x * 0.5,), (x,)
    )[0],
    "until all rows are done": lambda x, w: tf.while_loop(
        lambda x: tf.reduce_any(tf.reduce_max(x, [1, 2]) > 0.25),
        lambda x: (tf.where(tf.reduce_max(x, [1, 2], True) > 0.25, x * 0.5, x),),
        (x,),
    )[0],
    "it becomes a sum": lambda x, w: tf.while_loop(
        lambda i, _: i < 3,
        lambda i, s: (i + 1, s + tf.reduce_sum(x, [0, 1]) * tf.cast(i, x.dtype)),
        (0, tf.zeros([4], x.dtype)),
    )[1],
    "it becomes rows": lambda x, w: tf.while_loop(
        lambda i, _: i < 3,
        lambda i, s: (i + 1, s + x[:, 0]),
        (0, tf.zeros([tf.shape(x)[0], 4], x.dtype)),
    )[1],
    "nested": _repeated(
        lambda x, w: (*_repeated(lambda x: (x - tf.reduce_max(x) * 0.1,), 2)(x), w), 2
    ),
    "a branch within": _repeated(
        lambda x, w: (
            tf.cond(
                tf.reduce_mean(x) > 0.3, lambda: x - tf.reduce_mean(x, 0), lambda: x * 2
            ),
            w,
        )
    ),
    "lists": _collected,
    "lists of sums": _means,
    "map_fn over steps": lambda x, w: tf.map_fn(lambda s: s @ w, _steps(x)),
    "scan over steps": lambda x, w: tf.scan(lambda a, s: a * 0.5 + s, _steps(x)),
    "foldl": lambda x, w: tf.foldl(lambda a, s: a + s @ w, _steps(x)),
    "keras scan": lambda x, w: keras.ops.scan(
        lambda a, s: (a + s, a * 2.0),
        tf.zeros([tf.shape(x)[0], 4], x.dtype),
        _steps(x),
    )[1],
}


@pytest.mark.parametrize("seed", [0, left_out(1), 2])
def test_loops(seed: int) -> None:
    names = sorted(_LOOPS)[seed::3]
    operands = Operands(generator(seed), BLOCKS[1 + seed]).sharded([3, 4], 0, unit)
    operands = operands.whole([4, 4], unit)
    functions = {name: _LOOPS[name] for name in names}
    made = check(operands, functions, derivatives=1, tolerance=1e-10)
    assert not made.fallbacks, made.fallbacks


def test_loops_over_the_rows_themselves() -> None:
    functions = {
        "map_fn": lambda x, w: tf.map_fn(lambda row: row @ w, x),
        "vectorized_map": lambda x, w: tf.vectorized_map(lambda row: row @ w, x),
        "scan": lambda x, w: tf.scan(lambda a, row: a * 0.5 + row, x),
        "foldr": lambda x, w: tf.foldr(lambda a, row: a * 0.5 + row, x),
        "as often as there are rows": _repeated(
            lambda x, w: (x * 0.9, w), lambda x, w: tf.shape(x)[0]
        ),
    }
    operands = Operands(generator(0)).sharded([3, 4], 0, unit).whole([4, 4], unit)
    check(operands, functions, derivatives=1, tolerance=1e-10)


def _doubled(x: tf.Tensor) -> Any:
    return tf.function(lambda y: [y * 2]).get_concrete_function(
        tf.TensorSpec(x.shape, x.dtype)
    )


_BRANCHES: dict[str, Any] = {
    "rows in both": lambda p, x, w: tf.cond(p > 0.5, lambda: x @ w, lambda: x * 2),
    "one is whole": lambda p, x, w: tf.cond(
        p > 0.5, lambda: x, lambda: tf.zeros_like(x) + tf.reduce_sum(w)
    ),
    "sums in both": lambda p, x, w: tf.cond(
        p > 0.5, lambda: tf.reduce_sum(x, 0), lambda: tf.reduce_mean(x * x, 0)
    ),
    "a sum in one": lambda p, x, w: tf.cond(
        p > 0.5, lambda: tf.reduce_sum(x, 0), lambda: w[0]
    ),
    "sums and maxima": lambda p, x, w: tf.cond(
        p > 0.5, lambda: tf.reduce_sum(x), lambda: tf.reduce_max(x)
    ),
    "by a sum": lambda p, x, w: tf.cond(
        tf.reduce_mean(x) > 0.5, lambda: x - tf.reduce_mean(x), lambda: x @ w
    ),
    "by a number": lambda p, x, w: tf.raw_ops.If(
        cond=tf.stop_gradient(tf.round(p)),
        input=[tf.stop_gradient(x)],
        Tout=[x.dtype],
        then_branch=_doubled(x),
        else_branch=_doubled(x),
    )[0],
    "case": lambda p, x, w: tf.case(
        [(p > 0.7, lambda: x @ w), (p > 0.3, lambda: x - tf.reduce_max(x, 0))],
        default=lambda: x,
    ),
    "switch_case": lambda p, x, w: tf.switch_case(
        tf.cast(p * 3, tf.int32),
        [
            lambda: (x @ w, tf.reduce_sum(x)),
            lambda: (x - tf.reduce_mean(x, 0), tf.reduce_sum(w)),
            lambda: (x, tf.reduce_max(x)),
        ],
    ),
    "nested": lambda p, x, w: tf.cond(
        p > 0.5,
        lambda: tf.cond(
            tf.reduce_sum(x) > 2.0, lambda: x * tf.reduce_mean(x), lambda: x
        ),
        lambda: tf.cond(p > 0.2, lambda: x @ w, lambda: x[::-1]),
    ),
    "a loop within": lambda p, x, w: tf.cond(
        p > 0.5,
        lambda: _repeated(lambda x: (x - tf.reduce_mean(x, 0) * 0.1,))(x)[0],
        lambda: x,
    ),
    "other axes": lambda p, x, w: tf.transpose(
        tf.cond(p > 0.5, lambda: tf.transpose(x), lambda: tf.transpose(x * 2))
    ),
    "layouts that differ": lambda p, x, w: tf.cond(
        p > 0.5,
        lambda: tf.matmul(x, x, transpose_b=True),
        lambda: tf.transpose(tf.matmul(x * 2, x, transpose_b=True)),
    ),
    "shapes that differ": lambda p, x, w: tf.reduce_sum(
        tf.cond(p > 0.5, lambda: x, lambda: tf.concat([x, x], 0))
    ),
}


@pytest.mark.parametrize("seed", [0, 1, 2, left_out(3)])
def test_branches(seed: int) -> None:
    names = sorted(_BRANCHES)[seed::4]
    operands = Operands(generator(seed), BLOCKS[seed]).whole([], unit)
    operands = operands.sharded([4], 0, unit).whole([4, 4], unit)
    functions = {name: _BRANCHES[name] for name in names}
    check(operands, functions, derivatives=1, tolerance=1e-10)


@pytest.mark.parametrize(
    ("kind", "masked"),
    [
        ("GRU", True),
        ("LSTM", False),
        *(left_out(kind, "G" not in kind) for kind in ("GRU", "LSTM")),
        *(left_out("SimpleRNN", masked) for masked in (False, True)),
    ],
)
def test_recurrent_layers(kind: str, masked: bool) -> None:
    keras.utils.set_random_seed(1)
    layer = getattr(keras.layers, kind)(
        5, return_sequences=True, return_state=True, dtype="float64"
    )
    other = keras.layers.Bidirectional(
        getattr(keras.layers, kind)(3, dtype="float64", unroll=masked),
        dtype="float64",
    )
    for each in (layer, other):
        each.build((None, 4, 2))

    def function(x: tf.Tensor, n: tf.Tensor) -> Any:
        mask = tf.sequence_mask(n + 1, 4) if masked else None
        return *layer(x, mask=mask), other(x, mask=mask)

    operands = Operands(generator(0)).sharded([4, 2]).sharded([], 0, below(4))
    made = check(operands, {kind: function}, derivatives=1, tolerance=1e-10)
    assert not made.fallbacks, made.fallbacks


def test_loops_of_no_steps_and_lists_of_all_kinds() -> None:
    def mixed(x: tf.Tensor) -> Any:
        """Read a whole list whose elements are shares."""
        made = tf.TensorArray(x.dtype, 0, dynamic_size=True, infer_shape=False)
        made = made.write(0, x).write(1, x * 2)
        return made.concat()

    functions = {
        "no steps": _repeated(lambda x: (x - tf.reduce_mean(x),), 0),
        "no steps it turns out": _repeated(
            lambda x: (x - tf.reduce_mean(x),), lambda x: tf.rank(x) * 0
        ),
        "mixed": mixed,
        "gathered": lambda x: (
            tf.TensorArray(x.dtype, 2).unstack(tf.stack([x, x * 2])).gather([1, 0])
        ),
        "scattered": lambda x: (
            tf.TensorArray(x.dtype, 2).scatter([1, 0], tf.stack([x, x * 2])).stack()
        ),
        "split": lambda x: (
            tf.TensorArray(x.dtype, 2, infer_shape=False)
            .split(tf.transpose(x), [1, 2])
            .read(1)
        ),
    }
    operands = Operands(generator(0), (1, 1)).sharded([3], 0, unit)
    check(operands, functions, derivatives=1)


def test_variables_of_a_loop_that_come_back_along_another_axis() -> None:
    def function(x: tf.Tensor) -> Any:
        def body(i: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> Any:
            return i + 1, tf.transpose(b) + a, tf.transpose(a) + b

        square = tf.matmul(x, x, transpose_b=True)
        return tf.while_loop(
            lambda i, *_: i < 3, body, (0, square, tf.ones_like(square))
        )[1:]

    check(Operands(generator(2)).sharded([3], 0, unit), {"": function}, derivatives=1)


def test_connectionist_temporal_classification_is_computed_by_rows() -> None:
    """Its loops fill tables of the rows, which begin whole; it exists only in float32."""

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        ones = tf.ones([tf.shape(x)[0]], tf.int32)
        return tf.nn.ctc_loss(
            labels=tf.cast(tf.floor(y * 3), tf.int32) + 1,
            logits=tf.cast(x, tf.float32),
            label_length=2 * ones,
            logit_length=6 * ones,
            blank_index=0,
            logits_time_major=False,
        )

    operands = Operands(generator(3)).sharded([6, 5]).sharded([2], 0, unit)
    functions = {"sum": lambda x, y: tf.reduce_sum(loss(x, y))}
    made = check(operands, functions, derivatives=1, tolerance=1e-4)
    assert not made.fallbacks
    assert len(made.traffic.gathers) == 1  # of the slope, because it is returned
