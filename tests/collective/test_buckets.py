"""Buckets: which tensors travel together as one vector. No ranks."""

from __future__ import annotations

import numpy as np
import pytest

from collective.buckets import (
    ALIGNMENT,
    by_dtype,
    in_buckets,
    reduce_arrays_flat,
    reduce_flat,
)


def arrays() -> list[np.ndarray]:
    shapes = [((3, 5), "float32"), ((), "float64"), ((0, 2), "float32"),
              ((7,), "int64"), ((33,), "float32"), ((2, 2), "float64")]  # fmt: skip
    return [
        np.arange(np.prod(shape)).reshape(shape).astype(dtype) + 10 * i
        for i, (shape, dtype) in enumerate(shapes)
    ]


def test_a_group_has_one_dtype_and_keeps_the_order():
    assert by_dtype(arrays()) == [[0, 2, 4], [1, 5], [3]]
    assert by_dtype(arrays(), indices=[5, 4, 3, 1]) == [[5, 1], [4], [3]]
    assert by_dtype(arrays(), alone=15) == [[0], [1, 5], [2], [3], [4]]
    assert by_dtype([]) == []


def test_arrays_are_reduced_as_one_aligned_vector_for_each_dtype():
    vectors = []

    def triple(vector):
        vectors.append(vector.dtype.name)
        vector *= 3

    reduced = reduce_arrays_flat(arrays(), triple)
    assert vectors == ["float32", "float64", "int64"]
    for before, after in zip(arrays(), reduced, strict=True):
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after, before * 3)
        assert after.size == 0 or after.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize(
    "bytes_each, wanted",
    [(None, [[0, 1, 2, 3]]), (1, [[3], [2], [1], [0]]), (100, [[3, 2], [1, 0]])],
)
def test_buckets_are_filled_from_the_end(bytes_each, wanted):
    tf = pytest.importorskip("tensorflow")
    tensors = [tf.zeros(n) for n in (30, 20, 15, 10)]
    assert in_buckets(tensors, bytes_each) == wanted


def test_tensors_are_reduced_as_one_vector_for_each_dtype():
    tf = pytest.importorskip("tensorflow")
    reduced = reduce_flat([tf.constant(a) for a in arrays()], lambda vector: vector * 3)
    for before, after in zip(arrays(), reduced, strict=True):
        np.testing.assert_array_equal(after, before * 3)
        assert after.shape == before.shape
