"""All-gather, broadcast, reduce-scatter, all-to-all, barrier."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_data import (
    DTYPES,
    assert_close,
    reduced,
    same_everywhere,
    unaligned,
    values,
)

import collective
from collective.errors import UsageError
from collective.operations.kinds import Op

ROWS = st.lists(st.integers(0, 900), min_size=8, max_size=8)
SKIP = st.integers(0, 7)
ROW = st.lists(st.integers(0, 9), max_size=2).map(tuple)


@given(
    rows=ROWS,
    row=ROW,
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1, 40]),
    skip=SKIP,
)
@same_everywhere
def test_allgather(rank, size, rows, row, dtype, scale, skip):
    rows = [count * scale for count in rows]
    result = collective.allgather(
        unaligned(values(rank, (rows[rank], *row), dtype), skip)
    )
    wanted = [values(other, (rows[other], *row), dtype) for other in range(size)]
    np.testing.assert_array_equal(result, np.concatenate(wanted))


def test_allgather_of_many_megabytes_and_of_scalars(rank, size):
    count = 3_000_000 if rank == 0 else 100
    result = collective.allgather(np.full(count, rank, np.int8))
    assert result.size == 3_000_000 + 100 * (size - 1)
    np.testing.assert_array_equal(result[3_000_000:], np.repeat(range(1, size), 100))
    np.testing.assert_array_equal(collective.allgather(np.int64(rank)), range(size))


@given(
    shape=ROW,
    dtype=st.sampled_from(DTYPES),
    root=st.integers(0, 7),
    rows=st.integers(0, 2000),
    skip=SKIP,
)
@same_everywhere
def test_broadcast(rank, size, shape, dtype, root, rows, skip):
    root %= size
    array = unaligned(values(rank, (rows, *shape), dtype), skip)
    result = collective.broadcast(array, root)
    np.testing.assert_array_equal(result, values(root, (rows, *shape), dtype))


def test_broadcast_of_many_megabytes_in_place(rank, size):
    array = np.full(5_000_001, rank, np.float32)
    handle = collective.broadcast_async(array, size - 1, out=array)
    assert handle.wait() is array
    assert (array == size - 1).all()


@given(
    rows=ROWS,
    row=ROW,
    dtype=st.sampled_from(DTYPES[:-1]),
    op=st.sampled_from(list(Op)),
    even=st.booleans(),
    skip=SKIP,
)
@same_everywhere
def test_reducescatter(rank, size, rows, row, dtype, op, even, skip):
    splits = rows[:size]
    total = sum(splits)
    if even:
        splits = [total // size + (i < total % size) for i in range(size)]
    array = unaligned(values(rank, (total, *row), dtype), skip)
    result = collective.reducescatter(array, op, splits=None if even else splits)
    wanted = reduced([values(other, (total, *row), dtype) for other in range(size)], op)
    start = sum(splits[:rank])
    assert_close(result, wanted[start : start + splits[rank]])


@given(
    seed=st.integers(0, 1000),
    most=st.sampled_from([3, 800]),
    row=ROW,
    dtype=st.sampled_from(DTYPES),
    skip=SKIP,
)
@same_everywhere
def test_alltoall(rank, size, seed, most, row, dtype, skip):
    matrix = np.random.default_rng(seed).integers(0, most + 1, (size, size))
    array = unaligned(values(rank, (matrix[rank].sum(), *row), dtype), skip)
    result, received = collective.alltoall(array, list(matrix[rank]))
    np.testing.assert_array_equal(received, matrix[:, rank])
    wanted = []
    for other in range(size):
        theirs = values(other, (matrix[other].sum(), *row), dtype)
        start = matrix[other, :rank].sum()
        wanted.append(theirs[start : start + matrix[other, rank]])
    np.testing.assert_array_equal(result, np.concatenate(wanted))


def test_alltoall_of_equal_parts(rank, size):
    result, received = collective.alltoall(np.arange(size * 2) + 100 * rank)
    wanted = [100 * other + 2 * rank + i for other in range(size) for i in (0, 1)]
    np.testing.assert_array_equal(result, wanted)
    np.testing.assert_array_equal(received, 2)


def test_many_megabytes_in_parts(rank, size):
    count = 1_000_003
    array = values(rank, count * size, "int32")
    result, _ = collective.alltoall(array)
    wanted = [
        values(other, count * size, "int32")[rank * count : (rank + 1) * count]
        for other in range(size)
    ]
    np.testing.assert_array_equal(result, np.concatenate(wanted))
    part = collective.reducescatter(array, collective.Sum)
    everyone = [values(other, count * size, "int32") for other in range(size)]
    np.testing.assert_array_equal(
        part, reduced(everyone, Op.Sum)[rank * count : (rank + 1) * count]
    )


def test_handles_of_each(rank, size):
    gathered = collective.allgather_async(np.full((rank, 2), rank))
    scattered = collective.reducescatter_async(np.ones(2 * size), collective.Sum)
    exchanged = collective.alltoall_async(np.full(size, rank))
    waited = collective.barrier_async()
    assert gathered.wait().shape == (size * (size - 1) // 2, 2)
    np.testing.assert_array_equal(scattered.wait(), [size, size])
    np.testing.assert_array_equal(exchanged.wait()[0], range(size))
    assert waited.wait() is None


def test_barriers_let_nobody_pass_before_the_last_came(rank, size):
    for _ in range(100):
        collective.barrier()


def test_bad_arguments_are_refused(rank, size):
    with pytest.raises(UsageError, match="splits"):
        collective.alltoall(np.zeros(size), [1] * (size + 1))
    with pytest.raises(UsageError, match="no such root"):
        collective.broadcast(np.zeros(3), size)
    with pytest.raises(UsageError, match="splits"):
        collective.reducescatter(np.zeros(()))
