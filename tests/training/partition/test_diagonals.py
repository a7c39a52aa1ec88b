"""Diagonals and bands of matrices: of one for each row, and of one of all rows."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.training.partition.operands import Operands, check, generator


def _pairs(x: tf.Tensor) -> tf.Tensor:
    return x @ tf.transpose(x)


def _count(x: tf.Tensor) -> tf.Tensor:
    return tf.shape(x)[0]


@pytest.mark.parametrize("blocks", [(1,), (2,), (1, 1), (1, 2)])
def test_matrices_of_all_pairs(blocks: tuple[int, ...]) -> None:
    functions = {
        "part": lambda x: tf.linalg.diag_part(_pairs(x)),
        "trace": lambda x: tf.linalg.trace(_pairs(x)),
        "set": lambda x: tf.linalg.set_diag(_pairs(x), x[:, 0]),
        "zeros": lambda x: tf.linalg.set_diag(
            _pairs(x), tf.zeros([_count(x)], x.dtype)
        ),
        "columns": lambda x: tf.linalg.diag_part(
            tf.transpose(tf.exp(tf.linalg.set_diag(tf.transpose(_pairs(x)), x[:, 1])))
        ),
        "lower": lambda x: tf.linalg.band_part(_pairs(x), -1, 0) * 2.0,
        "band": lambda x: tf.transpose(
            tf.linalg.band_part(tf.transpose(_pairs(x)), 1, 0)
        ),
        "eye": lambda x: (
            _pairs(x) * (1 - tf.eye(_count(x), dtype=x.dtype))
            + tf.transpose(tf.eye(_count(x), dtype=x.dtype) * _pairs(x))
        ),
        "mask": lambda x: tf.where(
            tf.cast(tf.linalg.band_part(tf.ones([_count(x)] * 2), 0, -1), tf.bool),
            _pairs(x),
            -1e9,
        ),
        "diag": lambda x: tf.linalg.diag(x[:, 0]) @ x,
        "filled": lambda x: tf.linalg.diag(x[:, 0], padding_value=3.0) + _pairs(x),
        "batch": lambda x: tf.linalg.diag_part(
            tf.linalg.set_diag(tf.stack([_pairs(x)] * 2), tf.stack([x[:, 0]] * 2))
        ),
        "causal": lambda x: tf.nn.softmax(
            _pairs(x) - 1e9 * (1 - tf.linalg.band_part(tf.ones_like(_pairs(x)), -1, 0))
        ),
    }
    operands = Operands(generator(len(blocks)), blocks).sharded([3])
    made = check(operands, functions, derivatives=2)
    assert not made.fallbacks, made.fallbacks


def test_other_diagonals_are_made_whole() -> None:
    functions = {
        "above": lambda x: tf.linalg.diag_part(
            tf.pad(_pairs(x), [[0, 0], [0, 1]]), k=1
        ),
        "several": lambda x: tf.linalg.diag_part(_pairs(x), k=(0, 0)),
        "oblong": lambda x: tf.linalg.diag_part(_pairs(x)[:, :1]),
        "set": lambda x: tf.linalg.set_diag(
            tf.pad(_pairs(x), [[0, 0], [0, 1]]), x[:, 0], k=1
        ),
        "numbers": lambda x: tf.linalg.diag(tf.range(_count(x)), num_cols=20),
        "truth": lambda x: tf.linalg.diag_part(_pairs(x) > 0),
    }
    check(Operands(generator(5)).sharded([3]), functions)
