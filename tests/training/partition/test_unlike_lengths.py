"""Branches, loops and lists that join tensors of unlike lengths, and broadcasts by 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collective.training.partition.layouts import (
    ROWS,
    SUM,
    WHOLE,
    Listed,
    Sharded,
    is_convertible,
)
from collective.training.partition.sizes import (
    Symbol,
    above_zero,
    agreed,
    is_natural,
    symbolic,
)
from tests.training.partition.operands import Operands, check, generator, unit
from tests.training.partition.partitioned import Partitioned

_ANY = tf.TensorShape(None)
_OTHERS: dict[str, Any] = {
    "bank": lambda x, b: tf.concat([x, b], 0),
    "twice": lambda x, b: tf.concat([x, x], 0),
    "[:2]": lambda x, b: x[:2],
    "[1:]": lambda x, b: x[1:],
    "mask": lambda x, b: tf.boolean_mask(x, x[:, 0] > 0.4),
    "unique": lambda x, b: tf.gather(
        x, tf.unique(tf.cast(x[:, 0] * 3, tf.int32))[1][:2]
    ),
    "top": lambda x, b: tf.gather(
        x, tf.math.top_k(x[:, 0], (tf.shape(x)[0] + 1) // 2).indices
    ),
    "none": lambda x, b: tf.zeros([0, 4], x.dtype),
    "one": lambda x, b: tf.reduce_mean(x, 0, keepdims=True),
    "unknown": lambda x, b: tf.numpy_function(lambda a: a * 2, [x], x.dtype),
}


def _operands(seed: int) -> Operands:
    operands = Operands(generator(seed), [(1,), (1, 2)][seed % 2]).whole([], unit)
    return operands.sharded([4], 0, unit).whole([3, 4], unit)


@pytest.mark.parametrize("seed", range(2))
def test_branches(seed: int) -> None:
    def in_branch(other: Any) -> Any:
        return lambda p, x, b: tf.cond(p > 0.5, lambda: other(x, b), lambda: x * 2)

    def in_case(other: Any) -> Any:
        return lambda p, x, b: tf.switch_case(
            tf.cast(p * 3, tf.int32),
            [lambda: x, lambda: other(x, b), lambda: x[:, ::-1]],
        )

    names = sorted(_OTHERS)[seed::2]
    functions = {f"cond {n}": in_branch(_OTHERS[n]) for n in names}
    functions |= {f"case {n}": in_case(_OTHERS[n]) for n in names[:2]}
    functions["turned"] = lambda p, x, b: tf.cond(
        p > 0.5,
        lambda: tf.transpose(tf.matmul(x, x, transpose_b=True)),
        lambda: tf.matmul(x, x, transpose_b=True),
    )
    check(_operands(seed), functions, derivatives=1, tolerance=1e-10)


@pytest.mark.parametrize("seed", range(2))
def test_loops_and_lists(seed: int) -> None:
    def loop(other: Any) -> Any:
        def function(p: tf.Tensor, x: tf.Tensor, b: tf.Tensor) -> Any:
            return tf.while_loop(
                lambda i, _: i < 2,
                lambda i, y: (i + 1, other(y, b)),
                (0, x),
                shape_invariants=(tf.TensorShape([]), _ANY),
            )[1]

        return function

    def in_list(other: Any) -> Any:
        def function(p: tf.Tensor, x: tf.Tensor, b: tf.Tensor) -> Any:
            made = tf.TensorArray(x.dtype, 2, infer_shape=False, clear_after_read=False)
            made = made.write(0, x).write(1, other(x, b))
            return made.read(0), made.read(1), tf.shape(made.read(1))

        return function

    def grown(p: tf.Tensor, x: tf.Tensor, b: tf.Tensor) -> Any:
        return tf.while_loop(
            lambda i, *_: i < 3,
            lambda i, y, z: (i + 1, tf.concat([y, x], 0), y),
            (0, x, x[:2]),
            shape_invariants=(tf.TensorShape([]), *[tf.TensorShape([None, 4])] * 2),
        )[1:]

    names = [n for n in sorted(_OTHERS) if n != "mask"][seed::2]
    functions = {f"loop {n}": loop(_OTHERS[n]) for n in names}
    functions |= {f"list {n}": in_list(_OTHERS[n]) for n in names}
    functions["grown"] = grown
    check(_operands(seed), functions, tolerance=1e-10)


def test_operands_of_size_one_and_of_unknown_rank() -> None:
    def unknown(x: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(lambda a: a, [x], x.dtype)

    functions = {
        "dots": lambda x, q: tf.einsum("...qd,...kd->...qk", q, x),
        "dots over rows": lambda x, q: tf.reduce_mean(
            tf.einsum("...kd,...qd->...qk", x, q), 0
        ),
        "fewer axes": lambda x, q: tf.reduce_mean(
            tf.einsum("...kd,...qd->...qk", x, q[0]), [0, 1]
        ),
        "concat": lambda x, q: tf.concat([x, unknown(x)], 1),
        "stack": lambda x, q: tf.stack([unknown(x), x], 1),
        "set_diag": lambda x, q: tf.raw_ops.MatrixSetDiagV3(
            input=x, diagonal=unknown(x[:, 0, :3]), k=0
        ),
        "no time steps": lambda x, q: tf.reduce_sum(x[:, 1:][:, 3:], 1),
    }
    operands = Operands(generator(0), (1, 2)).sharded([3, 4]).whole([1, 2, 4])
    check(operands, functions, derivatives=1, tolerance=1e-10)


def test_no_sum_is_handed_on_by_what_may_be_large_or_zero() -> None:
    def function(x: tf.Tensor, big: tf.Tensor, zero: tf.Tensor) -> list[tf.Tensor]:
        total = tf.reduce_sum(x, 0)
        mean = total / tf.cast(tf.shape(x)[0], x.dtype) * 0.5
        return [total * big, total * 1e25, total / zero, total / 1e-30, mean]

    x = np.array([[1e20, 2.0], [-1e20, -1.0]], "float32")
    arguments = [x, np.float32(1e25), np.float32(0)]
    made = Partitioned(function, arguments, [True, False, False], replicas=2)
    for got, want in zip(made([1, 1], arguments), made.whole(arguments), strict=True):
        np.testing.assert_array_equal(got, want)
    plans = [n for n in made.partition.graph.nodes if n.type in ("Mul", "RealDiv")]
    assert sum(SUM in node.plan.outputs for node in plans) <= 2  # of the mean alone


def test_a_value_is_converted_only_where_it_is_proved_to_have_the_places() -> None:
    rows, other = symbolic(Symbol("rows")), symbolic(Symbol("other"))
    assert is_convertible(WHOLE, ROWS, (rows, 4), rows)
    assert is_convertible(WHOLE, Sharded(1, (1, 2)), (4, rows * 3), rows)
    for shape in [None, (other, 4), (8, 4), (rows * 2, 4), (1, 4), (0, 4), ()]:
        assert not is_convertible(WHOLE, ROWS, shape, rows)
        assert not is_convertible(SUM, ROWS, shape, rows)
        assert not is_convertible(Listed(WHOLE, shape), Listed(ROWS), None, rows)
    assert is_convertible(Listed(WHOLE, (rows, 4)), Listed(ROWS), None, rows)
    assert not is_convertible(Listed(ROWS, (rows, 4)), WHOLE, None, rows)
    assert not is_convertible(Listed(WHOLE, (rows, None)), Listed(ROWS), None, rows)


def test_which_of_several_sizes_an_axis_has() -> None:
    rows = symbolic(Symbol("rows"))
    assert agreed([rows, 1]) == 1 == agreed([1, 1], broadcasts=True)
    assert agreed([rows, 1], broadcasts=True) == rows
    assert agreed([rows, 5], broadcasts=True) == agreed([5, rows]) == 5
    assert agreed([rows, rows * 2], broadcasts=True) is None
    assert agreed([rows, None], broadcasts=True) is None
    assert agreed([4, 5]) is None
    assert agreed([None, rows]) == rows


def test_lengths_that_may_be_cut_off() -> None:
    class Axis:
        node, is_nested = None, False

    rows, time = symbolic(Symbol("rows")), symbolic(Symbol("time", (Axis(), 1)))
    assert above_zero(rows - 1) == rows - 1
    assert above_zero(-rows) == 0
    assert above_zero(time - 1) == above_zero(time - 1) != time - 1
    assert is_natural(above_zero(time - 1)) and not is_natural(time - 1)
