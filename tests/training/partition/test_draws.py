"""Random numbers equal the draws of one process, bit for bit."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.training.partition.operands import Operands, check, generator, left_out, unit

_SEED = [5, 7]
_FLOATS = ["float16", "bfloat16", "float32", "float64"]


def _kinds(dtype: str) -> dict[str, Any]:
    return {
        "uniform": lambda shape: tf.random.stateless_uniform(shape, _SEED, dtype=dtype),
        "normal": lambda shape: tf.random.stateless_normal(shape, _SEED, dtype=dtype),
        "truncated": lambda shape: tf.random.stateless_truncated_normal(
            shape, _SEED, dtype=dtype
        ),
    }


_INTEGERS = {
    f"{dtype} {kind}": lambda shape, dtype=dtype, most=most: (
        tf.random.stateless_uniform(
            shape, _SEED, None if most is None else 0, most, dtype
        )
    )
    for dtype in ("int32", "int64", "uint32", "uint64")
    for kind, most in (("full", None), ("below", 10))
    if most is None or dtype.startswith("int")
}


def _rows(x: tf.Tensor) -> tf.Tensor:
    return tf.shape(x)[0]


def test_draws_that_xla_compiles_are_its_own() -> None:
    def compiled(draw: Any) -> Any:
        of_shape = tf.function(lambda n: draw([n, 3]), jit_compile=True)
        return lambda x: of_shape(_rows(x))

    kinds = _kinds("float64")
    functions = {name: compiled(draw) for name, draw in kinds.items()}
    operands = Operands(generator(0), (1, 2)).sharded([2], 0, unit)
    check(operands, functions, tolerance=1e-12)


_DTYPES = [*_FLOATS, "integers"]


@pytest.mark.parametrize(
    ("dtype", "blocks"),
    [
        *((dtype, (1,)) for dtype in _DTYPES),
        ("float32", (1, 1)),
        *(left_out(dtype, (1, 1)) for dtype in _DTYPES if dtype != "float32"),
    ],
)
def test_draws_of_rows(dtype: str, blocks: tuple[int, ...]) -> None:
    kinds = _INTEGERS if dtype == "integers" else _kinds(dtype)
    functions = {}
    for name, draw in kinds.items():
        functions |= {
            f"{name} of rows": lambda x, draw=draw: draw([_rows(x)]),
            f"{name} of odd rows": lambda x, draw=draw: draw([_rows(x), 3, 1]),
            f"{name} of two batches": lambda x, draw=draw: draw([2 * _rows(x), 5]),
            f"{name} of wide rows": lambda x, draw=draw: tf.reshape(
                draw([_rows(x) * 3, 5]), [_rows(x), 15]
            ),
            f"{name} of columns": lambda x, draw=draw: draw([3, _rows(x), 5]),
            f"{name} of the last": lambda x, draw=draw: draw([2, 2, _rows(x)]),
            f"{name} of nothing": lambda x, draw=draw: draw([_rows(x), 0]),
            f"{name} alone": lambda x, draw=draw: draw([7]),
        }
    operands = Operands(generator(len(blocks)), blocks).sharded([3])
    made = check(operands, functions, tolerance=0)
    assert set(made.fallbacks) <= {"Reshape"}, made.fallbacks
    gathered = {value.node.type for value in made.traffic.gathers}
    assert not gathered or not any("Random" in name for name in gathered)


def test_other_draws_are_made_whole() -> None:
    functions = {
        "gamma": lambda x: tf.random.stateless_gamma([_rows(x), 3], _SEED, 2.0),
        "gamma of rows": lambda x: tf.random.stateless_gamma(
            [_rows(x)], _SEED, x[:, 0] + 0.5, dtype=x.dtype
        ),
        "binomial": lambda x: tf.random.stateless_binomial(
            [_rows(x), 3], _SEED, 10.0, 0.3
        ),
        "binomial of rows": lambda x: tf.random.stateless_binomial(
            [3, _rows(x)], _SEED, 10.0, x[:, 0]
        ),
        "poisson": lambda x: tf.random.stateless_poisson([_rows(x), 3], _SEED, 4.0),
        "poisson of rows": lambda x: tf.random.stateless_poisson(
            [2, _rows(x)], _SEED, x[:, 0]
        ),
        "categorical": lambda x: tf.random.stateless_categorical(x, 4, _SEED),
        "shuffle": lambda x: tf.random.experimental.stateless_shuffle(x, _SEED),
        "index shuffle": lambda x: tf.random.experimental.index_shuffle(
            tf.range(_rows(x)), _SEED, _rows(x) - 1
        ),
        "parameters": lambda x: tf.random.stateless_parameterized_truncated_normal(
            [_rows(x)], _SEED, tf.cast(x[:, 0], tf.float32), 1.0, -1.0, 2.0
        ),
        "beta": lambda x: keras.random.beta([_rows(x), 2], 0.5, 0.7, seed=3),
        "keras shuffle": lambda x: keras.random.shuffle(x, 1, seed=3),
        "keras categorical": lambda x: keras.random.categorical(x, 3, seed=3),
    }
    check(Operands(generator(0)).sharded([3], 0, unit), functions, tolerance=0)


def test_draws_in_loops_and_branches() -> None:
    def looped(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda i, _: i < 3,
            lambda i, x: (
                i + 1,
                x + tf.random.stateless_normal(tf.shape(x), [i, 3], dtype=x.dtype),
            ),
            (0, x),
        )[1]

    functions = {
        "loop": looped,
        "branch": lambda x: tf.cond(
            tf.reduce_mean(x) > 0.5,
            lambda: (
                x * tf.random.stateless_uniform([_rows(x), 3], _SEED, dtype=x.dtype)
            ),
            lambda: x + tf.random.stateless_normal([_rows(x), 3], _SEED, dtype=x.dtype),
        ),
        "dropout": lambda x: tf.nn.experimental.stateless_dropout(x, 0.5, _SEED),
        "dropout of columns": lambda x: tf.nn.experimental.stateless_dropout(
            tf.transpose(x), 0.5, _SEED
        ),
        "noise of a shape": lambda x: tf.nn.experimental.stateless_dropout(
            x, 0.5, _SEED, noise_shape=[_rows(x), 1]
        ),
    }
    made = check(Operands(generator(0), (1, 1)).sharded([3], 0, unit), functions)
    assert not made.fallbacks


def test_generators_of_state() -> None:
    """A ``tf.random.Generator`` and Keras' seeds advance once in a step."""
    ours, theirs = (tf.random.Generator.from_seed(3) for _ in range(2))
    seeds = [keras.random.SeedGenerator(5) for _ in range(2)]
    by_call: list[Any] = []

    def function(x: tf.Tensor) -> list[tf.Tensor]:
        own, seed = by_call[-1]
        return [
            own.normal([_rows(x), 3]),
            own.uniform([_rows(x)]),
            keras.random.normal([_rows(x), 2], seed=seed),
        ]

    from tests.training.partition.partitioned import Partitioned

    x = np.zeros([5, 3])
    results = []
    for pair in ((theirs, seeds[0]), (ours, seeds[1])):
        by_call.append(pair)
        made = Partitioned(function, [x], [True], replicas=3)
        if pair[0] is theirs:
            results.append([made.whole([x]) for _ in range(2)])
        else:
            results.append([made([2, 0, 3], [x]) for _ in range(2)])
    for want, got in zip(*results, strict=True):
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(ours.state, theirs.state)
    np.testing.assert_array_equal(seeds[0].state, seeds[1].state)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_drawn_classes_lie_by_rows(dtype: str) -> None:
    """They are drawn for all rows; later operations run on the rank's own rows."""

    def picked(x: tf.Tensor) -> tf.Tensor:
        logits = tf.cast(x, dtype)
        drawn = tf.random.stateless_categorical(logits, 2, [1, 2])
        return tf.gather(logits, drawn, axis=1, batch_dims=1)

    operands = Operands(generator(3)).sharded([4])
    functions = {
        "picked": picked,
        "times": lambda x: picked(x) * tf.cast(x, dtype)[:, :2],
    }
    made = check(operands, functions, derivatives=1, tolerance=1e-5)
    assert made.fallbacks == ["StatelessMultinomial"]
