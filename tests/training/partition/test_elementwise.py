"""Operations on each element give the same for a share and for the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from collective.training.partition.rules import elementwise
from tests.training.partition.operands import (
    BLOCKS,
    Operands,
    below,
    check,
    complex_,
    generator,
    left_out,
    raw,
    signed,
    truth,
    unit,
)
from tests.training.partition.partitioned import Partitioned

_OF_WHOLE_NUMBERS = {"Invert", "PopulationCount"}
_OF_COMPLEX = {"Real", "Imag", "Conj", "ComplexAbs", "Angle"}
_OTHERS = {
    "Cast",
    "CheckNumerics",
    "CheckNumericsV2",
    "FakeQuantWithMinMaxArgs",
    "LogicalNot",
}
_ONE = sorted(
    set(elementwise._ONE)
    - _OF_WHOLE_NUMBERS
    - _OF_COMPLEX
    - _OTHERS
    - {"BesselK0", "BesselK1", "BesselY0", "BesselY1", "FresnelCos", "FresnelSin"}
)


def _one(type_: str) -> Any:
    return lambda x: raw(type_, x)


@pytest.mark.parametrize("seed", range(4))
def test_functions_of_one(seed: int) -> None:
    rng = generator(seed)
    operands = Operands(rng, BLOCKS[-seed]).sharded([3], seed % 2, unit)
    if seed == 3:
        operands = Operands(rng).partial([3], unit)
    twice = seed < 2  # each seed tests the derivatives of half of them
    functions = {type_: _one(type_) for type_ in (_ONE[seed::2] if twice else _ONE)}
    functions["CheckNumerics"] = lambda x: tf.debugging.check_numerics(x, "x")
    functions["CheckNumericsV2"] = lambda x: raw("CheckNumericsV2", x, message="x")
    functions["Cast"] = lambda x: tf.cast(tf.cast(x, tf.float32), x.dtype)
    functions["LogicalNot"] = lambda x: ~(x > 0.5)
    made = check(operands, functions, derivatives=2 * twice, tolerance=1e-11)
    assert not made.fallbacks


@pytest.mark.parametrize("seed", range(2))
def test_functions_of_one_of_other_dtypes(seed: int) -> None:
    rng = generator(seed)
    whole_numbers = {type_: _one(type_) for type_ in _OF_WHOLE_NUMBERS}
    whole_numbers["Cast"] = lambda x: tf.cast(x, tf.float64)
    operands = Operands(rng, (1, 2)).sharded([2, 3], 1, below(100))
    assert not check(operands, whole_numbers).fallbacks
    of_complex = {
        type_: lambda x, f=type_: raw(
            f, x, **({} if f == "Conj" else {"Tout": tf.float64})
        )
        for type_ in _OF_COMPLEX
    }
    operands = Operands(rng, (1, 1)).sharded([3], seed, complex_)
    assert not check(operands, of_complex).fallbacks
    narrow = {
        "FakeQuantWithMinMaxArgs": lambda x: (
            tf.quantization.fake_quant_with_min_max_args(tf.cast(x, tf.float32))
        )
    }
    operands = Operands(rng).sharded([3], seed)
    assert not check(operands, narrow, derivatives=1, tolerance=1e-6).fallbacks


_BINARY = [
    "Add",
    "AddV2",
    "Sub",
    "Mul",
    "Div",
    "DivNoNan",
    "RealDiv",
    "FloorDiv",
    "FloorMod",
    "Mod",
    "TruncateMod",
    "Pow",
    "Maximum",
    "Minimum",
    "SquaredDifference",
    "Xdivy",
    "Xlogy",
    "Xlog1py",
    "MulNoNan",
    "Atan2",
    "Igamma",
    "Igammac",
    "IgammaGradA",
    "Zeta",
    "Less",
    "LessEqual",
    "Greater",
    "GreaterEqual",
    "Equal",
    "NotEqual",
    "NextAfter",
]
_ALIKE = [
    "EluGrad",
    "InvGrad",
    "ReciprocalGrad",
    "Relu6Grad",
    "ReluGrad",
    "RsqrtGrad",
    "SeluGrad",
    "SigmoidGrad",
    "SoftplusGrad",
    "SoftsignGrad",
    "SqrtGrad",
    "TanhGrad",
    "LeakyReluGrad",
    "ApproximateEqual",
]


def _second(operands: Operands, kind: int, values: Any = unit) -> Operands:
    """Add an operand to one of shape ``[3, rows]``; it may be broadcast."""
    return (
        operands.sharded([3], 1, values)
        if kind == 0
        else operands.counted([3], 1)
        if kind == 1
        else operands.whole([3, 1], values)
        if kind == 2
        else operands.whole([], values)
        if kind == 3
        else operands.sharded([], 0, values)
        if kind == 4
        else operands.whole([2, 1, 1], values)
    )


# Each function with two kinds of operands, twice derived with one or with all.
@pytest.mark.parametrize(
    ("kind", "share"), [(k, 3) for k in range(6)] + [left_out(k, 1) for k in range(6)]
)
def test_functions_of_two(kind: int, share: int) -> None:
    rng = generator(kind)
    operands = Operands(rng, BLOCKS[kind % len(BLOCKS)]).sharded([3], 1, unit)
    types = _BINARY[kind % share :: share]
    functions = {
        type_: lambda x, y, f=type_: raw(f, x, y)
        for type_ in types + _ALIKE[kind :: min(share, 2)] * (kind < 2)
    }
    functions["Complex"] = tf.complex
    swapped = {f"swapped {t}": lambda x, y, f=t: raw(f, y, x) for t in types}
    order = 2 if kind < 4 else 1
    made = check(
        _second(operands, kind), functions | swapped, derivatives=order, tolerance=1e-11
    )
    assert not made.fallbacks


@pytest.mark.parametrize("kind", [0, 2, 3, 4])
def test_functions_of_two_of_other_dtypes(kind: int) -> None:
    rng = generator(kind)
    for values, types in (
        (
            below(9),
            "BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift Add Mul Maximum",
        ),
        (truth, "LogicalAnd LogicalOr"),
        (complex_, "Add Mul Sub Div"),
    ):
        operands = Operands(rng, BLOCKS[kind]).sharded([3], 1, values)
        functions = {t: lambda x, y, f=t: raw(f, x, y) for t in types.split()}
        assert not check(_second(operands, kind, values), functions).fallbacks


def test_functions_of_several() -> None:
    rng = generator(0)
    functions = {
        "AddN": lambda x, y, z: tf.add_n([x, y, z]),
        "SelectV2": lambda x, y, z: tf.where(x > 0.5, y, z),
        "ClipByValue": lambda x, y, z: tf.raw_ops.ClipByValue(
            t=x, clip_value_min=0.3, clip_value_max=0.7
        ),
        "Betainc": lambda x, y, z: tf.math.betainc(x, y, z),
        "IdentityN": lambda x, y, z: tf.raw_ops.IdentityN(input=[x, y + 1, z]),
        "Select": lambda x, y, z: tf.raw_ops.Select(condition=x > 0.5, x=y, y=z),
    }
    operands = Operands(rng, (1, 2)).sharded([3], 1, unit).sharded([3], 1, unit)
    assert not check(operands.counted([3], 1), functions, derivatives=1).fallbacks
    mixed = {
        "SelectV2": lambda x, y, z: tf.where(x > 0.5, y, z),
        "of scalars": lambda x, y, z: tf.where(y > 0.5, z, x),
        "Select": lambda x, y, z: tf.raw_ops.Select(
            condition=x[:, 0] > 0.5, x=x, y=2 * x
        ),
        "Select of a scalar": lambda x, y, z: tf.raw_ops.Select(
            condition=z > 0.5, x=x, y=2 * x
        ),
    }
    operands = Operands(rng, (1, 1)).sharded([3], 0, unit).whole([1, 3], unit)
    assert not check(operands.whole([], unit), mixed, derivatives=2).fallbacks


@pytest.mark.parametrize("seed", range(2))
def test_sums_over_replicas_pass_through_what_is_linear(seed: int) -> None:
    rng = generator(seed)
    functions = {
        "Neg": lambda x, y, w: -x,
        "Identity": lambda x, y, w: tf.identity(x),
        "times": lambda x, y, w: x * w,
        "by": lambda x, y, w: x / w,
        "no nan": lambda x, y, w: tf.math.divide_no_nan(x, w),
        "plus whole": lambda x, y, w: x + w,
        "whole minus": lambda x, y, w: w - x,
        "both": lambda x, y, w: x + y,
        "add_n": lambda x, y, w: tf.add_n([x, y, w]),
        "product": lambda x, y, w: x * y,
        "broadcast": lambda x, y, w: x[:, None] + w,
        "scalar": lambda x, y, w: tf.reduce_sum(x) + 1.0,
        "wider": lambda x, y, w: tf.cast(tf.cast(x, tf.float32), tf.float64) * 0.5,
        "square": lambda x, y, w: tf.square(x) + x,
        "like": lambda x, y, w: tf.ones_like(x) + tf.cast(tf.shape(x)[0], x.dtype) * x,
        "chain": lambda x, y, w: tf.reduce_mean(tf.transpose(x[None] * 2.0)) / 3.0,
    }
    operands = Operands(rng).partial([4], signed).partial([4], signed)
    made = check(operands.whole([4], unit), functions, derivatives=1, tolerance=1e-6)
    assert not made.fallbacks
    assert not made.traffic.gathers


def test_a_sum_of_float16_overflows_where_that_of_all_rows_does() -> None:
    x = np.array([[4e4, 1], [3e4, 2], [2e4, 4]], np.float16)

    def function(x: tf.Tensor) -> list[tf.Tensor]:
        total, halved = tf.reduce_sum(x, 0), tf.reduce_sum(x, 0) * 0.5
        return [tf.cast(total, tf.float32), tf.cast(halved, tf.float32)]

    made = Partitioned(function, [x], [True], replicas=2)
    for results in made.whole([x]), made([1, 2], [x]):
        np.testing.assert_array_equal(results, [[np.inf, 7], [np.inf, 3.5]])


def test_shapes_that_are_checked_and_bits() -> None:
    rng = generator(0)
    functions = {
        "EnsureShape": lambda x: tf.ensure_shape(x, [None, 4]),
        "Bitcast": lambda x: tf.bitcast(tf.cast(x, tf.float64), tf.int64),
        "Bitcast to a narrower": lambda x: tf.bitcast(tf.cast(x, tf.float64), tf.int32),
    }
    made = check(Operands(rng, (1, 2)).sharded([4]), functions)
    assert made.fallbacks == ["Bitcast"]
