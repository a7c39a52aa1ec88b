"""Ranks that do not make the same call all hear of it, and can go on."""

import numpy as np
import pytest

import collective
from collective import Disagreement


@pytest.fixture(autouse=True)
def several(size):
    if size == 1:
        pytest.skip("one rank always agrees with itself")


def still_works(size):
    np.testing.assert_array_equal(
        collective.allreduce(np.ones(200_000), collective.Sum), size
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
    with pytest.raises(Disagreement, match="algorithm=ring"):
        collective.allreduce(np.ones(5), algorithm="ring" if rank else "tree")
    array = np.ones(5, np.float32)
    with pytest.raises(Disagreement, match="transport=bfloat16"):
        collective.allreduce(array, transport_dtype="bfloat16" if rank else None)
    still_works(size)


def test_gathered_rows_of_different_shapes(rank, size):
    with pytest.raises(Disagreement, match=r"\[\?, 3\].*\[\?, 4\]"):
        collective.allgather(np.ones((2, 4 if rank else 3)))
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
