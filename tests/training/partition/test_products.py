"""Rules of products, each compared with one process."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.training.partition.operands import (
    BLOCKS,
    Operands,
    check,
    generator,
    left_out,
)


@pytest.mark.parametrize("seed", [0, left_out(1), left_out(2), 3])
def test_products(seed: int) -> None:
    blocks = BLOCKS[1 + seed]
    functions = {
        "MatMul": lambda x, y, w: x @ w,
        "transposed": lambda x, y, w: tf.matmul(
            w, x, transpose_a=True, transpose_b=True
        ),
        "over rows": lambda x, y, w: tf.matmul(x, y, transpose_a=True),
        "rows by rows": lambda x, y, w: tf.matmul(x, y, transpose_b=True),
        "each": lambda x, y, w: tf.matmul(x[:, None], y[:, :, None]),
        "BatchMatMulV2": lambda x, y, w: tf.matmul(x[:, :, None], y[:, None]) @ w,
        "broadcast": lambda x, y, w: tf.matmul(
            w[None], x[:, :, None], transpose_a=True
        ),
        "batches first": lambda x, y, w: tf.matmul(
            tf.stack([x, y]), tf.stack([w, w * 2])
        ),
        "dot": lambda x, y, w: tf.einsum("bi,bi->b", x, y),
        "all": lambda x, y, w: tf.einsum("bi,bi->", x, y),
        "outer": lambda x, y, w: tf.einsum("bi,bj->ij", x, y),
        "dots": lambda x, y, w: tf.einsum("...i,ij->...j", x, w),
        "three": lambda x, y, w: tf.einsum("bi,ij,bi->bj", x, w, y),
        "pairs": lambda x, y, w: tf.einsum("bi,ci->bc", x, y),
        "tensordot": lambda x, y, w: tf.tensordot(x, w, 1),
        "matvec": lambda x, y, w: tf.linalg.matvec(x, w[:, 0]),
    }
    operands = Operands(generator(seed), blocks).sharded([3]).sharded([3]).whole([3, 3])
    made = check(operands, functions, derivatives=2 if seed == 0 else 1)
    assert not made.fallbacks


def test_products_of_columns() -> None:
    functions = {
        "MatMul": lambda x, y: x @ tf.transpose(y),
        "contracted": lambda x, y: tf.matmul(x, y, transpose_b=True),
        "diagonal": lambda x, y: tf.einsum("ib,ib->b", x, y),
        "with whole": lambda x, y: tf.einsum("ib,jb->ij", x, y),
        "of numbers": lambda x, y: tf.matmul(
            tf.cast(x * 9, tf.int32), tf.ones([4, 2], tf.int32), transpose_a=True
        ),
    }
    operands = Operands(generator(0), (1, 2)).sharded([4], 1).counted([4], 1)
    assert not check(operands, functions, derivatives=1).fallbacks
