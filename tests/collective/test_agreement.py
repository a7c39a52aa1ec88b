"""Ranks that make different calls all get an error, and can continue."""

import numpy as np
import pytest

import collective
from collective import Disagreement


@pytest.fixture(autouse=True)
def several(size):
    if size == 1:
        pytest.skip("one rank always agrees with itself")


def still_works(size):
    mine = np.arange(200_000.0) * (collective.rank() + 1)
    np.testing.assert_array_equal(
        collective.allreduce(mine, collective.Sum),
        np.arange(200_000.0) * (size * (size + 1) // 2),
    )


@pytest.mark.parametrize("count", [2, 100_000])
def test_shapes(rank, size, count):
    shape = (count, 1) if rank == size - 1 else (count,)
    with pytest.raises(Disagreement) as raised:
        collective.allreduce(np.ones(shape), name="gradient")
    text = str(raised.value)
    assert f"[{count}]" in text and f"[{count},1]" in text
    assert "'gradient'" in text and f"rank {size - 1}:" in text and "HINT" in text
    still_works(size)


def test_dtypes(rank, size):
    array = np.ones(5, np.float32 if rank else np.float64)
    with pytest.raises(Disagreement, match=r"float64.*float32|float32.*float64"):
        collective.allreduce(array)
    still_works(size)


def test_names(rank, size):
    with pytest.raises(Disagreement, match=r"'a'.*'b'"):
        collective.allreduce(np.ones(5), name="b" if rank else "a")
    still_works(size)


def test_operations(rank, size):
    with pytest.raises(Disagreement, match=r"max.*sum|sum.*max"):
        collective.allreduce(np.ones(5), collective.Max if rank else collective.Sum)
    still_works(size)


def test_roots(rank, size):
    with pytest.raises(Disagreement, match=r"root=0.*root=1|root=1.*root=0"):
        collective.broadcast(np.ones(50_000), min(rank, 1))
    still_works(size)


def test_collectives(rank, size):
    with pytest.raises(Disagreement, match="barrier"):
        if rank:
            collective.barrier()
        else:
            collective.allreduce(np.ones(5))
    still_works(size)


def test_algorithms_and_transports(rank, size):
    with pytest.raises(Disagreement, match="algorithm=direct"):
        collective.allreduce(
            np.ones(5), algorithm="direct" if rank else "halving-doubling"
        )
    array = np.ones(5, np.float32)
    with pytest.raises(Disagreement, match="transport=bfloat16"):
        collective.allreduce(array, transport_dtype="bfloat16" if rank else None)
    still_works(size)


# The call, and its name in the error. Rows are gathered and exchanged after their
# numbers.
LARGE = {
    "all-reduce": lambda array, out: collective.allreduce(
        array, collective.Sum, out=out
    ),
    "150000": lambda array, out: collective.allreduce(
        array[:150_000], collective.Sum, out=out[:150_000]
    ),
    "broadcast": lambda array, out: collective.broadcast(array, 1),
    "lengths of": lambda array, out: collective.allgather(array),
    "reduce-scatter": lambda array, out: collective.reducescatter(array),
    "splits of": lambda array, out: collective.alltoall(array),
    "barrier": lambda array, out: collective.barrier(),
}


@pytest.mark.parametrize("count", [240_000, 1_200_000])
@pytest.mark.parametrize("some", LARGE)
def test_large_ones_leave_outputs_alone_and_chunks_in_step(rank, size, count, some):
    """Ranks have filled shared slots before they see the mismatch, and not all of them
    as many."""
    array, out = np.full(count, rank, np.float32), np.full(count, -1.0, np.float32)
    for time, others in enumerate(sorted(set(LARGE) - {some})):
        with pytest.raises(Disagreement, match=f"{some}.*{others}|{others}.*{some}"):
            LARGE[some if rank == time % size else others](array, out)
        assert np.all(out == -1)
        still_works(size)


def test_gathered_rows_of_different_shapes(rank, size):
    with pytest.raises(Disagreement, match=r"\[\?, 3\].*\[\?, 4\]"):
        collective.allgather(np.ones((2, 4 if rank else 3)))
    still_works(size)


def test_numbers_of_arrays(rank, size):
    with pytest.raises(Disagreement, match=r"\[2\] float64\[2\]"):
        collective.grouped_allreduce([np.ones(2)] * (2 if rank else 3))
    still_works(size)


def test_parts_of_a_scattered_sum(rank, size):
    splits = [0] * size
    splits[min(rank, 1)] = 6
    with pytest.raises(Disagreement, match=r"each rank 6,0.*each rank 0,6") as raised:
        collective.reducescatter(np.ones(6), name="weights", splits=splits)
    assert "'weights'" in str(raised.value)
    still_works(size)


def test_exchanged_rows_of_different_shapes(rank, size):
    with pytest.raises(Disagreement, match=r"\[\?, 3\].*\[\?, 4\]"):
        collective.alltoall(np.ones((size, 4 if rank else 3)))
    still_works(size)


def test_within_a_set(rank, size):
    everyone = collective.ProcessSet(range(size))
    alone = collective.ProcessSet([0])
    with pytest.raises(Disagreement, match=r"rank 0: .*\[2\]; rank 1.*\[3\]"):
        collective.allreduce(np.ones(3 if rank else 2), process_set=everyone)
    assert alone.included() == (rank == 0)
    still_works(size)


def test_process_sets(rank, size):
    with pytest.raises(Disagreement, match="process set"):
        collective.ProcessSet([min(rank, 1)])
    still_works(size)


def test_through_handles(rank, size):
    bad = collective.allreduce_async(np.ones(4 + min(rank, 1)))
    good = collective.allreduce_async(np.ones(4), collective.Sum)
    with pytest.raises(Disagreement):
        bad.wait()
    np.testing.assert_array_equal(good.wait(), size)
