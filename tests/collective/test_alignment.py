"""Arrays at any address: every collective, dtype, operation, and number of elements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_data import (
    DTYPES,
    assert_close,
    numpy_dtype,
    reduced,
    same_everywhere,
    values,
)

import collective
from collective.operations.kinds import Op

# Around a register, a cache line, the beginning of peeling, a post, and a chunk.
COUNTS = st.one_of(st.integers(0, 300), st.integers(500, 5000), st.integers(0, 200_000))
OFFSETS = st.one_of(st.just(0), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 63))
UNTOUCHED = 0x5A


def placed(count, dtype, offset):
    """Return an array so many bytes after a cache line, and its memory."""
    bytes_each = np.dtype(dtype).itemsize
    memory = np.full(count * bytes_each + 192, UNTOUCHED, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64 + offset
    array = memory[start : start + count * bytes_each].view(dtype)
    return array, (memory[:start], memory[start + count * bytes_each :])


def filled(array, offset):
    moved, _ = placed(array.size, array.dtype, offset)
    moved[...] = array
    return moved


def assert_untouched(around):
    assert all((part == UNTOUCHED).all() for part in around)


@given(
    count=COUNTS,
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(list(Op)),
    offsets=st.tuples(OFFSETS, OFFSETS),
    in_place=st.booleans(),
)
@same_everywhere
def test_all_reduce(rank, size, count, dtype, op, offsets, in_place):
    if dtype == "bool" and op == Op.Average:
        op = Op.Max
    source = filled(values(rank, count, dtype, count), offsets[0])
    out, around = placed(count, numpy_dtype(dtype), offsets[1])
    if in_place:
        out[...] = source
        source = out
    assert collective.allreduce(source, op, out) is out
    everyone = [values(other, count, dtype, count) for other in range(size)]
    assert_close(out, reduced(everyone, op))
    assert_untouched(around)


@given(
    count=COUNTS,
    transport=st.sampled_from(["float16", "bfloat16"]),
    offsets=st.tuples(OFFSETS, OFFSETS),
)
@same_everywhere
def test_sixteen_bits_on_the_way(rank, size, count, transport, offsets):
    # Small numbers, exact in 16 bits together with their sum.
    source = filled(values(rank, count, "float32", count), offsets[0])
    out, around = placed(count, np.dtype("f4"), offsets[1])
    collective.allreduce(source, collective.Sum, out, transport_dtype=transport)
    wanted = sum(values(other, count, "float32", count) for other in range(size))
    np.testing.assert_array_equal(out, wanted)
    assert_untouched(around)


@given(
    which=st.sampled_from(["broadcast", "allgather", "reducescatter", "alltoall"]),
    count=st.integers(0, 70_000),
    dtype=st.sampled_from(DTYPES),
    offsets=st.tuples(OFFSETS, OFFSETS),
)
@same_everywhere
def test_the_other_collectives(rank, size, which, count, dtype, offsets):
    everyone = [values(other, count * size, dtype, count) for other in range(size)]
    parts = [array[rank * count :][:count] for array in everyone]
    wanted = {
        "broadcast": everyone[-1],
        "allgather": np.concatenate(everyone),
        "reducescatter": reduced(parts, Op.Sum),
        "alltoall": np.concatenate(parts),
    }[which]
    source = filled(everyone[rank], offsets[0])
    out, around = placed(wanted.size, wanted.dtype, offsets[1])
    if which == "broadcast":
        collective.broadcast(source, size - 1, out)
    elif which == "reducescatter":
        collective.reducescatter(source, collective.Sum, out)
    else:
        getattr(collective, which)(source, out=out)
    np.testing.assert_array_equal(out, wanted)
    assert_untouched(around)


# Beyond the size from which outputs are written around the caches, line by line.
@pytest.mark.parametrize(
    ("dtype", "count", "offset", "transport"),
    [
        ("float32", 4_200_001, 16, None),
        ("float32", 4_200_000, 3, "bfloat16"),
        ("int8", 16_800_077, 1, None),
    ],
)
def test_a_large_output(rank, size, dtype, count, offset, transport):
    source = filled(np.resize(values(rank, 997, dtype), count), 8)
    out, around = placed(count, np.dtype(dtype), offset)
    collective.allreduce(source, collective.Sum, out, transport_dtype=transport)
    few = reduced([values(other, 997, dtype) for other in range(size)], Op.Sum)
    np.testing.assert_array_equal(out, np.resize(few, count))
    assert_untouched(around)
