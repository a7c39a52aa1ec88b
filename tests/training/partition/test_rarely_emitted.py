"""Operations with a rule that TensorFlow's own functions hardly make any more.

Saved models and older code have them. ``emitted`` lists the operations that no test emits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.training.partition.operands import (
    Operands,
    below,
    check,
    generator,
    raw,
    signed,
    unit,
)


def checked(operands: Operands, functions: dict[str, Any], **words: Any) -> None:
    """Compare with one process; each operation is cut by its rows, and none runs whole."""
    made = check(operands, functions, **words)
    assert not made.fallbacks, made.fallbacks


def test_whole_numbers() -> None:
    types = ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift")
    functions: dict[str, Any] = {
        name: lambda x, y, name=name: raw(name, x, y) for name in types
    }
    functions["TruncateDiv"] = lambda x, y: raw("TruncateDiv", x, y + 1)
    operands = Operands(generator(0), (1, 2))
    checked(operands.sharded([3], 0, below(7)).sharded([3], 0, below(7)), functions)


def test_matrices() -> None:
    functions = {
        "MatrixDiag": lambda x, d: raw("MatrixDiag", d),
        "MatrixDiagV2": lambda x, d: raw(
            "MatrixDiagV2", d, 0, 3, 3, tf.constant(0.5, d.dtype)
        ),
        "MatrixDiagPart": lambda x, d: raw("MatrixDiagPart", x),
        "MatrixDiagPartV2": lambda x, d: raw(
            "MatrixDiagPartV2", x, 1, tf.zeros([], x.dtype)
        ),
        "MatrixSetDiag": lambda x, d: raw("MatrixSetDiag", x, d),
        "MatrixSetDiagV2": lambda x, d: raw("MatrixSetDiagV2", x, d, 0),
        "BatchMatMul": lambda x, d: raw("BatchMatMul", x, x, adj_x=True),
        "BatchMatMulV3": lambda x, d: raw("BatchMatMulV3", x, x, Tout=x.dtype),
        "ConjugateTranspose": lambda x, d: raw(
            "ConjugateTranspose", tf.complex(x, x), [0, 2, 1]
        ),
        "CholeskyGrad": lambda x, d: raw(
            "CholeskyGrad", tf.linalg.cholesky(x @ tf.transpose(x, [0, 2, 1]) + _EYE), x
        ),
    }
    operands = Operands(generator(1), (1,)).sharded([3, 3], 0, unit)
    checked(operands.sharded([3], 0, unit), functions, tolerance=1e-9)


_EYE = 2 * np.eye(3)


def _pooled(x: tf.Tensor) -> tf.Tensor:
    return raw("MaxPoolV2", x, [1, 2, 2, 1], [1, 2, 2, 1], padding="SAME")


def test_images() -> None:
    windows = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    functions = {
        "MaxPoolV2": lambda x, b: _pooled(x),
        "MaxPoolGradV2": lambda x, b: raw(
            "MaxPoolGradV2", x, _pooled(x), 2 * _pooled(x), **windows
        ),
        "MaxPoolGradGradV2": lambda x, b: raw(
            "MaxPoolGradGradV2", x, _pooled(x), 3 * x, **windows
        ),
        "Conv": lambda x, b: raw(
            "Conv", x, _KERNEL, strides=[1, 1, 1, 1], padding="SAME"
        ),
        "DrawBoundingBoxesV2": lambda x, b: tf.image.draw_bounding_boxes(
            tf.cast(x, tf.float32), tf.cast(b, tf.float32), [[1.0, 0.0, 0.5]]
        ),
        "QuantizeAndDequantizeV2": lambda x, b: raw(
            "QuantizeAndDequantizeV2",
            x,
            -1.0,
            2.0,
            range_given=True,
        ),
        "QuantizeAndDequantizeV3": lambda x, b: raw(
            "QuantizeAndDequantizeV3", x, -2.0, 2.0, 8, range_given=True
        ),
    }
    operands = Operands(generator(2), (1, 1)).sharded([4, 4, 3], 0, unit)
    checked(operands.sharded([2, 4], 0, unit), functions, tolerance=1e-6)


_KERNEL = np.random.default_rng(0).normal(size=(2, 2, 3, 2))


def test_volumes() -> None:
    windows = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "SAME"}

    def pooled(x: tf.Tensor) -> tf.Tensor:
        return raw("MaxPool3D", x, **windows)

    functions = {
        "MaxPool3DGradGrad": lambda x: raw(
            "MaxPool3DGradGrad", _narrow(x), pooled(_narrow(x)), _narrow(x), **windows
        ),
        "RFFT3D": lambda x: tf.abs(tf.signal.rfft3d(x[..., 0])),
        "IRFFT3D": lambda x: tf.signal.irfft3d(tf.signal.rfft3d(x[..., 0])),
    }
    operands = Operands(generator(3), (1, 2)).sharded([4, 4, 4, 1], 0, unit)
    checked(operands, functions, tolerance=1e-6)


def _narrow(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32)


def test_places_in_rows() -> None:
    functions = {
        "Gather": lambda x, i: raw("Gather", _KERNEL.reshape(8, 3), i),
        "InTopK": lambda x, i: raw("InTopK", _narrow(x), i, k=2),
        "NthElement": lambda x, i: raw("NthElement", x, 1),
        "LowerBound": lambda x, i: raw("LowerBound", tf.sort(x), x),
        "UpperBound": lambda x, i: raw("UpperBound", tf.sort(x), x),
    }
    operands = Operands(generator(4), (1, 1)).sharded([4], 0, signed)
    checked(operands.sharded([], 0, below(4)), functions)
