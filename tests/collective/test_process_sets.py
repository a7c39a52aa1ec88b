import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_data import DTYPES, assert_close, reduced, same_everywhere, values

import collective
from collective.errors import UsageError
from collective.operations.kinds import Op


@pytest.fixture(scope="module")
def halves(needs_core):
    """Return the sets of even and odd ranks."""
    size = collective.size()
    return [
        collective.ProcessSet(range(start, size, 2)) for start in (0, 1) if start < size
    ]


def test_the_halves_reduce_apart(rank, size, halves):
    mine = halves[rank % 2]
    assert mine.included() and mine.size() == len(range(rank % 2, size, 2))
    assert mine.rank() == rank // 2
    for count in (1, 200_000):
        result = collective.allreduce(
            values(rank, count, "float32"), collective.Sum, process_set=mine
        )
        wanted = sum(values(other, count, "float32") for other in mine.ranks)
        np.testing.assert_array_equal(result, wanted)


@given(
    count=st.integers(0, 60_000),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from([op for op in Op if op != Op.Average]),
)
@same_everywhere
def test_any_within_a_set(rank, size, halves, count, dtype, op):
    mine = halves[rank % 2]
    array = values(rank, count, dtype, seed=count)
    result = collective.allreduce(array, op, process_set=mine)
    everyone = [values(other, count, dtype, count) for other in mine.ranks]
    assert_close(result, reduced(everyone, op))


def test_all_collectives_within_a_set(rank, size, halves):
    mine = halves[rank % 2]
    members = list(mine.ranks)
    last = members[-1]
    rows = collective.allgather(np.full((rank + 1, 1), rank), process_set=mine)
    np.testing.assert_array_equal(
        rows[:, 0], np.repeat(members, [m + 1 for m in members])
    )
    assert collective.broadcast(np.array(rank), last, process_set=mine) == last
    received, _ = collective.alltoall(np.full(len(members), rank), process_set=mine)
    np.testing.assert_array_equal(received, members)
    part = collective.reducescatter(
        np.arange(len(members)) * 1.0, collective.Sum, process_set=mine
    )
    np.testing.assert_array_equal(part, [mine.rank() * len(members)])
    collective.barrier(process_set=mine)


def test_a_stranger_is_refused(rank, size, halves):
    if size == 1:
        pytest.skip("one rank: no stranger")
    other = halves[1 - rank % 2]
    assert not other.included() and other.rank() is None
    with pytest.raises(UsageError, match="is not in ProcessSet"):
        collective.allreduce(np.ones(1), process_set=other)


def test_a_rank_outside_the_job_is_refused(rank, size):
    with pytest.raises(UsageError, match="not in this job"):
        collective.ProcessSet([0, size])


def test_a_set_of_one_and_of_all(rank, size):
    alone = collective.ProcessSet([0])
    everyone = collective.ProcessSet(range(size))
    if rank == 0:
        np.testing.assert_array_equal(
            collective.allreduce(np.arange(3), process_set=alone), range(3)
        )
    total = collective.allreduce(np.array(rank), collective.Sum, process_set=everyone)
    assert total == size * (size - 1) // 2
