"""Byte order, overlapping memory, and handles that are waited for more than once."""

import threading
import time

import numpy as np
import pytest
from rank_data import values

import collective
from collective.errors import UsageError


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", ">i4", ">i8"])
def test_another_byte_order_is_converted(rank, size, dtype):
    native = np.dtype(dtype).newbyteorder("=")
    numbers = [np.array([1.5, 1000.25, -2]) * (r + 1) for r in range(size)]
    everyone = [array.astype(native) for array in numbers]
    # It may also differ between ranks.
    mine = everyone[rank].astype(dtype if rank % 2 == 0 else native)
    total = collective.allreduce(mine, collective.Sum)
    assert total.dtype == native
    np.testing.assert_array_equal(total, sum(everyone))
    np.testing.assert_array_equal(collective.broadcast(mine, 0), everyone[0])
    np.testing.assert_array_equal(collective.allgather(mine), np.concatenate(everyone))
    scattered = collective.reducescatter(np.tile(mine, size), collective.Max)
    np.testing.assert_array_equal(scattered, np.max(everyone, 0))
    swapped = np.array([1.0, 2.0], dtype)
    with pytest.raises(UsageError, match=r"(?s)out is >.*byte order"):
        collective.allreduce(swapped, out=swapped)
    collective.barrier()


@pytest.mark.parametrize("count", [100, 500_000])
@pytest.mark.parametrize("shift", [1, 50, -1, -50])
def test_an_output_that_overlaps_its_input(rank, size, count, shift):
    def memory(seed):
        whole = values(rank, count + 50, "float64", seed)
        first, second = whole[: count - abs(shift)], whole[abs(shift) : count]
        return (first, second) if shift > 0 else (second, first)

    def total(seed):
        start = 0 if shift > 0 else abs(shift)
        return sum(
            values(r, count + 50, "float64", seed)[start:][: count - abs(shift)]
            for r in range(size)
        )

    source, out = memory(1)
    result = collective.allreduce(source, collective.Sum, out=out)
    assert result is out
    np.testing.assert_array_equal(out, total(1))
    source, out = memory(2)
    collective.broadcast(source, size - 1, out=out)
    first = 0 if shift > 0 else abs(shift)
    wanted = values(size - 1, count + 50, "float64", 2)[first:]
    np.testing.assert_array_equal(out, wanted[: out.size])


def test_overlaps_within_a_list_and_between_the_rows(rank, size):
    def pair():
        return [np.full(10, rank + 1.0), np.full(10, 10.0 * (rank + 1))]

    ones = size * (size + 1) / 2
    # Each result goes to the place of the other input.
    a, b = pair()
    collective.grouped_allreduce([a, b], collective.Sum, out=[b, a])
    assert (b == ones).all() and (a == 10 * ones).all()
    a, b = pair()
    collective.grouped_allreduce([a, b], collective.Sum, out=[a, b])
    assert (a == ones).all() and (b == 10 * ones).all()
    a, b = pair()
    collective.grouped_allreduce([a, a], collective.Sum, out=[a, b])
    assert (a == ones).all() and (b == ones).all()
    for out in ([a, a], [a[:], a[::1]]):
        with pytest.raises(UsageError, match=r"out\[0\] and out\[1\] overlap"):
            collective.grouped_allreduce([a, b], collective.Sum, out=out)
    if size == 1:
        return
    whole = np.full(2 * size, -1.0)
    whole[1:3] = rank
    collective.allgather(whole[1:3], out=whole)
    np.testing.assert_array_equal(whole, np.repeat(np.arange(size), 2))
    rows = np.arange(2.0 * size) + rank
    part = rows[-2:]
    collective.reducescatter(rows, collective.Sum, out=part)
    wanted = size * np.array([2.0 * rank, 2.0 * rank + 1]) + size * (size - 1) / 2
    np.testing.assert_array_equal(part, wanted)


def test_a_handle_that_failed_fails_each_time(rank, size):
    if size == 1:
        pytest.skip("one rank always agrees with itself")
    handle = collective.allreduce_async(np.full(3 + min(rank, 1), 7.0))
    for _ in range(3):
        with pytest.raises(collective.Disagreement, match="do not agree"):
            handle.wait()
        assert handle.done()


def test_several_threads_wait_for_a_handle(rank, size):
    out = np.full(2, -1.0)
    found = []

    def waits():
        found.append(handle.wait().copy())

    if rank == size - 1:
        time.sleep(0.2)  # the others wait
    handle = collective.allreduce_async(np.full(2, 1.0 + rank), collective.Sum, out=out)
    threads = [threading.Thread(target=waits) for _ in range(4)]
    for thread in threads:
        thread.start()
    while not handle.done():
        time.sleep(0.001)
    waits()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(found, np.full((5, 2), size * (size + 1) / 2))
