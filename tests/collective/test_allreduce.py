import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_data import (
    DTYPES,
    assert_close,
    numpy_dtype,
    reduced,
    same_bits,
    same_everywhere,
    unaligned,
    values,
)

import collective
from collective.errors import UsageError
from collective.operations.kinds import ALGORITHMS, Op

# Around the limits of a cache line, a post, a part, a chunk.
COUNTS = [0, 1, 3, 17, 63, 64, 65, 1000, 1025, 4097, 131_071, 131_073, 300_007]


def everyone(size, shape, dtype, seed=0):
    return [values(rank, shape, dtype, seed) for rank in range(size)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_float32(rank, size, count, algorithm):
    result = collective.allreduce(
        values(rank, count, "float32"), collective.Sum, algorithm=algorithm
    )
    assert_close(result, reduced(everyone(size, count, "float32"), Op.Sum))
    assert same_bits(collective, result)


@pytest.mark.parametrize("count, times", [(16_384, 700), (2_000_003, 4)])
def test_many_in_a_row(rank, size, count, times):
    """There are enough calls for slots to be written in both ways."""
    sent = values(rank, count, "float32")
    wanted = reduced(everyone(size, count, "float32"), Op.Sum)
    for number in range(times):
        scale = np.float32(2.0 ** (number % 8))  # exact
        result = collective.allreduce(sent * scale, collective.Sum)
        assert_close(result, wanted * scale)


def test_an_all_reduce_that_only_multiplies_would_be_found_out(rank, size):
    """With the same data on every rank it would look like a sum."""
    if size == 1:
        pytest.skip("one rank: they are the same")
    for count in COUNTS[2:]:
        wanted = reduced(everyone(size, count, "float32"), Op.Sum)
        with pytest.raises(AssertionError):
            assert_close(values(rank, count, "float32") * np.float32(size), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("count", [5, 40_003])
def test_every_dtype_and_operation(rank, size, dtype, op, count):
    array = values(rank, count, dtype)
    if dtype == "bool" and op == Op.Average:
        if size > 1:
            with pytest.raises(UsageError, match="bool has no average"):
                collective.allreduce(array, op)
        return
    result = collective.allreduce(array, op)
    assert_close(result, reduced(everyone(size, count, dtype), op))
    assert same_bits(collective, result)


@given(
    count=st.integers(0, 200_000),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from([op for op in Op if op != Op.Average]),
    algorithm=st.sampled_from(list(ALGORITHMS)),
    skip=st.integers(0, 7),
    in_place=st.booleans(),
)
@same_everywhere
def test_any(rank, size, count, dtype, op, algorithm, skip, in_place):
    array = unaligned(values(rank, count, dtype, seed=count), skip)
    out = array if in_place else None
    result = collective.allreduce(array, op, out, algorithm=algorithm)
    assert (result is array) == in_place
    assert_close(result, reduced(everyone(size, count, dtype, count), op))


@given(
    count=st.integers(0, 150_000),
    dtype=st.sampled_from([name for name in DTYPES if "float" in name]),
    op=st.sampled_from([Op.Sum, Op.Average]),
    algorithm=st.sampled_from(list(ALGORITHMS)),
    in_place=st.booleans(),
)
@same_everywhere
def test_what_must_be_rounded_is_rounded_alike(
    rank, size, count, dtype, op, algorithm, in_place
):
    def numbers(of):
        generator = np.random.default_rng([count, of])
        return generator.standard_normal(count).astype(numpy_dtype(dtype))

    array = numbers(rank)
    result = collective.allreduce(
        array, op, array if in_place else None, algorithm=algorithm
    )
    assert same_bits(collective, result)
    everyone = [numbers(other).astype(np.float64) for other in range(size)]
    wanted = sum(everyone) / (size if op == Op.Average else 1)
    # Each addition may lose half a unit in the last place, of float16 and bfloat16 in
    # the algorithms that add hop by hop.
    bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[dtype]
    most = sum(np.abs(one) for one in everyone) * size * 2.0**-bits
    assert (np.abs(result.astype(np.float64) - wanted) <= most + 2.0**-20).all()
    if algorithm in ("direct", "one-shot") and op == Op.Sum and dtype == "float64":
        np.testing.assert_array_equal(result, wanted)  # in the order of the ranks


@given(
    shapes=st.lists(
        st.lists(st.integers(0, 60), max_size=3).map(tuple), min_size=1, max_size=12
    ),
    dtypes=st.lists(st.sampled_from(DTYPES[:-1]), min_size=12, max_size=12),
    algorithm=st.sampled_from(list(ALGORITHMS)),
    op=st.sampled_from([Op.Sum, Op.Average, Op.Max]),
)
@same_everywhere
def test_groups_of_any_mixture(rank, size, shapes, dtypes, algorithm, op):
    pairs = list(zip(shapes, dtypes, strict=False))
    arrays = [values(rank, shape, dtype, i) for i, (shape, dtype) in enumerate(pairs)]
    results = collective.grouped_allreduce(arrays, op, algorithm=algorithm)
    for i, (shape, dtype) in enumerate(pairs):
        assert_close(results[i], reduced(everyone(size, shape, dtype, i), op))


def test_a_large_group_is_reduced_where_it_lies(rank, size):
    shapes = [(3, 3, 64, 64), (64,), (1,), (512, 1000), (7,), (250_001,)]
    arrays = [values(rank, shape, "float32", i) for i, shape in enumerate(shapes)]
    collective.grouped_allreduce(arrays, collective.Sum, out=arrays)
    for i, shape in enumerate(shapes):
        assert_close(arrays[i], reduced(everyone(size, shape, "float32", i), Op.Sum))


@pytest.mark.parametrize("in_place", [True, False])
def test_many_megabytes(rank, size, in_place):
    count = 4_500_001  # outputs of this size are written around the caches
    array = values(rank, count, "float32")
    result = collective.allreduce(array, collective.Sum, array if in_place else None)
    assert_close(result, reduced(everyone(size, count, "float32"), Op.Sum))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", [1, 100, 70_001, 1_000_003])
def test_sixteen_bit_transport(rank, size, dtype, count):
    array = values(rank, count, "float32") * np.float32(1.001)
    result = collective.allreduce(array, collective.Sum, transport_dtype=dtype)
    wanted = sum(
        values(other, count, "float32").astype(np.float64) * 1.001
        for other in range(size)
    )
    step = 2**-8 if dtype == "bfloat16" else 2**-11
    # Every value is rounded once for the transport, and the sum once more.
    np.testing.assert_allclose(result, wanted, rtol=0, atol=step * 10 * (size + 1))
    assert same_bits(collective, result)
    if size > 1 and dtype in DTYPES:
        np.testing.assert_array_equal(
            result, result.astype(numpy_dtype(dtype)).astype(np.float32)
        )


def test_float16_is_summed_in_float32_and_rounded_once(rank, size):
    # 2048 + 1 is 2048 in float16: a sum in float16 would lose the ones.
    array = np.full(100, 2048 if rank == 0 else 1, np.float16)
    result = collective.allreduce(array, collective.Sum)
    np.testing.assert_array_equal(result, np.float16(2048 + size - 1))


@pytest.mark.parametrize("dtype", [name for name in DTYPES if "float16" in name])
def test_every_16_bit_value_survives(rank, size, dtype):
    bits = np.arange(1 << 16, dtype=np.uint16)
    array = bits.view(numpy_dtype(dtype))
    result = collective.allreduce(array, collective.Max)
    number = ~np.isnan(array.astype(np.float32))
    np.testing.assert_array_equal(result.view(np.uint16)[number], bits[number])
    assert np.isnan(result.astype(np.float32)[~number]).all()


@pytest.mark.parametrize("count", [8, 100_000])
def test_nan_and_infinity_reach_every_rank(rank, size, count):
    array = np.ones(count, np.float32)
    if rank == size - 1:
        array[1], array[2] = np.nan, np.inf
    for op in (collective.Sum, collective.Min, collective.Max):
        result = collective.allreduce(array, op)
        assert np.isnan(result[1])
        assert np.isfinite(result[0])
    assert np.isposinf(collective.allreduce(array, collective.Sum)[2])


def test_default_is_the_average(rank, size):
    result = collective.allreduce(np.full(3, float(rank)))
    np.testing.assert_allclose(result, (size - 1) / 2)


def test_handles_may_be_waited_for_in_any_order(rank, size):
    arrays = [values(rank, 1 + 5000 * i, "float64", i) for i in range(8)]
    handles = [collective.allreduce_async(array, collective.Sum) for array in arrays]
    for i in reversed(range(8)):
        wanted = reduced(everyone(size, 1 + 5000 * i, "float64", i), Op.Sum)
        assert_close(handles[i].wait(), wanted)
        assert handles[i].done()
        assert handles[i].wait() is handles[i].wait()


def test_blocking_calls_follow_handles(rank, size):
    slow = collective.allreduce_async(np.full(1_000_000, rank, np.float32))
    quick = collective.allreduce(np.full(2, rank, np.float64), collective.Sum)
    np.testing.assert_array_equal(quick, size * (size - 1) / 2)
    np.testing.assert_allclose(slow.wait(), (size - 1) / 2)


def test_strided_input_and_scalars(rank, size):
    array = values(rank, (20, 30), "float32")
    result = collective.allreduce(array.T[::2], collective.Sum)
    wanted = reduced([v.T[::2] for v in everyone(size, (20, 30), "float32")], Op.Sum)
    assert_close(result, wanted)
    assert collective.allreduce(np.float64(rank), collective.Max) == size - 1


def test_an_output_that_does_not_fit_is_refused(rank):
    with pytest.raises(UsageError, match="HINT: pass a writable"):
        collective.allreduce(np.zeros(3), out=np.zeros(4))
    with pytest.raises(UsageError, match="complex"):
        collective.allreduce(np.zeros(3, complex))
    with pytest.raises(UsageError, match="halving-doubling"):
        collective.allreduce(np.zeros(3), algorithm="butterfly")
