"""Rows that are cut out, put in another order, or joined, and what a network makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collective.training.partition.layouts import WHOLE
from collective.training.partition.sizes import (
    Symbol,
    fraction,
    is_natural,
    symbolic,
)
from tests.training.partition.meeting import on_two_ranks
from tests.training.partition.operands import (
    Operands,
    check,
    generator,
    left_out,
    unit,
)
from tests.training.partition.partitioned import Partitioned

WIDE = 300  # so that a product with weights is worth sharing out


def _n(x: tf.Tensor) -> Any:
    return tf.shape(x)[0]


def _encoded(x: tf.Tensor, w: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    return tf.nn.tanh(tf.nn.tanh(x @ w) @ v)


_CUTS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "[1:]": lambda x: x[1:],
    "[:-1]": lambda x: x[:-1],
    "[:3]": lambda x: x[:3],
    "[-2:]": lambda x: x[-2:],
    "first half": lambda x: x[: _n(x) // 2],
    "second half": lambda x: x[_n(x) // 2 :],
    "even": lambda x: x[::2],
    "odd": lambda x: x[1::2],
    "of a cut": lambda x: x[1:][::2][1:],
    "of columns": lambda x: tf.transpose(tf.transpose(x)[::-1, 1:]),
    "Slice": lambda x: tf.slice(x, [1, 0], [-1, 4]),
    "Split": lambda x: tf.split(tf.repeat(x, 2, 0), 2)[1],
}
_ORDERS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "[::-1]": lambda x: x[::-1],
    "reverse": lambda x: tf.reverse(x, [0]),
    "mixed": lambda x: 0.3 * x + 0.7 * tf.reverse(x, [0]),
    "shuffle": lambda x: tf.random.experimental.stateless_shuffle(x, [1, 2]),
    "mask": lambda x: tf.boolean_mask(x, x[:, 0] > 0.5),
    "joined": lambda x: tf.concat([x[1:], x[:1]], 0),
}


def _products_of_all_rows(made: Partitioned) -> list[Any]:
    """Products that every replica computes whole."""
    nodes = made.partition.graph.nodes
    products = [node for node in nodes if node.type == "MatMul"]
    return [n for n in products if all(lay == WHOLE for lay in n.plan.inputs)]


def _operands(seed: int, blocks: tuple[int, ...] = (1,)) -> Operands:
    operands = Operands(generator(seed), blocks).sharded([4], 0, unit)
    return operands.whole([4, WIDE], unit).whole([WIDE, 4], unit)


@pytest.mark.parametrize("seed", [0, left_out(1)])
def test_a_network_is_shared_out_behind_rows_that_are_cut_out(seed: int) -> None:
    functions = {
        name: lambda x, w, v, cut=_CUTS[name]: _encoded(cut(x), w, v)
        for name in sorted(_CUTS)[seed::2]
    }
    blocks = [(1,), (2,)][seed]
    made = check(_operands(seed, blocks), functions, derivatives=1, tolerance=1e-9)
    outputs = made.partition.graph.outputs
    assert not made.fallbacks and not _products_of_all_rows(made)
    assert all(value in outputs for value in made.traffic.gathers)


def test_a_network_is_shared_out_behind_rows_in_another_order() -> None:
    functions = {
        name: lambda x, w, v, order=order: _encoded(order(x), w, v)
        for name, order in _ORDERS.items()
    }
    functions["drawn"] = lambda x, w, v: (
        tf.gather(w, tf.random.stateless_categorical(x, 3, [1, 2])) @ v
    )
    made = check(_operands(3), functions, derivatives=1, tolerance=1e-9)
    assert not _products_of_all_rows(made)


def test_parts_of_a_batch_meet_again() -> None:
    def two(x: tf.Tensor) -> list[tf.Tensor]:
        return [x[: _n(x) // 2], x[_n(x) // 2 :]]

    functions = {
        "joined": lambda x, w, v: (
            tf.concat([_encoded(part, w, v) for part in two(x)], 0) + x
        ),
        "pairs": lambda x, w, v: tf.reduce_sum(
            _encoded(x[1:], w, v) * _encoded(x[:-1], w, v), -1
        ),
        "contrast": lambda x, w, v: tf.nn.log_softmax(
            _encoded(two(x)[0], w, v) @ tf.transpose(_encoded(two(x)[1], w, v))
        ),
        "normalized": lambda x, w, v: tf.nn.softmax(
            _encoded(x[1:] - tf.reduce_mean(x[1:], 0), w, v), 0
        ),
        "differences": lambda x, w, v: _encoded(x, w, v)[1:] - _encoded(x, w, v)[:-1],
        "in a branch": lambda x, w, v: tf.cond(
            tf.reduce_sum(x) > 3, lambda: _encoded(x[1:], w, v), lambda: x[1:] * 2
        ),
        "in a loop": lambda x, w, v: tf.while_loop(
            lambda i, y: i < 2, lambda i, y: (i + 1, _encoded(y, w, v)), (0, x[::2])
        )[1],
        "of none": lambda x, w, v: tf.reduce_sum(_encoded(x[20:], w, v)),
        "first of some": lambda x, w, v: _encoded(x[::2], w, v)[0],
    }
    check(_operands(4), functions, derivatives=1, tolerance=1e-9)


def test_on_ranks_of_unlike_shares() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(7, 4)), tf.constant(rng.normal(size=(4, WIDE)))

    def function(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            parts = [x[1:], x[::2], x[1::2], x[:3], x[::-1]]
            made = [tf.nn.tanh(part @ w) for part in parts]
            score = tf.add_n([tf.reduce_sum(y * y) for y in made])
        return [*made, tape.gradient(score, x)]

    want = tf.function(function, autograph=False)(tf.constant(x))
    for counts in ([4, 3], [0, 7], [6, 1], [7, 0]):
        for found in on_two_ranks(function, x, counts):
            for a, b in zip(want, found, strict=True):
                np.testing.assert_allclose(b, a, 1e-12, 1e-12)


def test_fractions_of_sizes() -> None:
    rows = symbolic(Symbol("rows"))
    half, exact = fraction(rows, 2), fraction(rows, 2, is_exact=True)
    assert fraction(rows * 2, 2) == rows and fraction(7, 2) == 3
    assert half == fraction(rows, 2) != exact
    assert exact + exact == rows and rows - exact == exact and exact * 3 == rows + exact
    assert half + half != rows
    assert is_natural(half) and is_natural(rows - half) and is_natural(rows - 2 * half)
    assert not is_natural(half - 1) and not is_natural(half - rows)
