"""Collectives by name: each rank submits them in its own order, by its own threads."""

import random
import threading
import time

import numpy as np
import pytest
from rank_data import assert_close, assert_rests, reduced, values

import collective
from collective.operations.call import Call
from collective.operations.kinds import Kind, Op

COUNTS = [1, 10, 3000, 70_000, 0, 300_000, 17, 5]


def start(rank, number, turn=0):
    """Start the all-reduce of this number; its handle returns the sum."""
    array = values(rank, COUNTS[number], "float64", seed=number + 10 * turn)
    out = np.empty_like(array)
    name = f"tensor {number}"
    return Call(Kind.ALL_REDUCE, [(array, out)], out, name=name, order=1).start()


def assert_summed(size, number, result, turn=0):
    seed = number + 10 * turn
    arrays = [values(r, COUNTS[number], "float64", seed) for r in range(size)]
    assert_close(result, reduced(arrays, Op.Sum))


def mixed(rank, turn):
    """Return the numbers in this rank's own order."""
    return random.Random(100 * turn + rank).sample(range(len(COUNTS)), len(COUNTS))


@pytest.mark.parametrize("turn", range(4))
def test_any_order(rank, size, turn):
    handles = {number: start(rank, number, turn) for number in mixed(rank, turn)}
    for number in mixed(rank, turn + 50):
        assert_summed(size, number, handles[number].wait(), turn)


def test_the_same_name_twice_runs_in_the_order_of_submission(rank, size):
    turns = range(3)
    handles = [[start(rank, n, t) for n in mixed(rank, t)] for t in turns]
    for turn in turns:
        for number, handle in zip(mixed(rank, turn), handles[turn], strict=True):
            assert_summed(size, number, handle.wait(), turn)


@pytest.mark.parametrize("late", ["each in turn", "at random"])
def test_few_bytes_whoever_comes_late(rank, size, late):
    """The calling thread sums them, or, after a while, the queue's thread."""
    for turn in range(60):
        if late == "each in turn":
            time.sleep(0.001 * (turn % size == rank))
        else:
            time.sleep(random.Random(turn * size + rank).choice([0, 2e-5, 1e-4, 3e-3]))
        number = turn % 2
        assert_summed(size, number, start(rank, number, turn).wait(), turn)


def test_to_ask_for_few_bytes_does_not_wait_for_the_others(rank, size):
    for last in range(size):
        handle = None
        if rank != last:
            handle = start(rank, 0, last)
        collective.barrier()  # reached only if the previous call has returned
        handle = handle or start(rank, 0, last)
        assert_summed(size, 0, handle.wait(), last)


def test_from_several_threads_and_beside_calls_in_order(rank, size):
    results = {}

    def run(number):
        for turn in range(10):
            results[number, turn] = start(rank, number, turn).wait()

    threads = [threading.Thread(target=run, args=(n,)) for n in mixed(rank, 7)]
    for thread in threads:
        thread.start()
    for turn in range(50):
        handle = collective.allreduce_async(np.array([rank, turn]), collective.Sum)
        collective.barrier()
        np.testing.assert_array_equal(
            handle.wait(), [size * (size - 1) // 2, turn * size]
        )
    for thread in threads:
        thread.join()
    for (number, turn), result in results.items():
        assert_summed(size, number, result, turn)


def test_a_disagreement_leaves_the_others_as_they_are(rank, size):
    if size == 1:
        pytest.skip("one rank always agrees with itself")
    arrays = [(np.ones(3 + min(rank, 1)), np.ones(3 + min(rank, 1)))]
    before = {number: start(rank, number) for number in mixed(rank, 1)[:4]}
    handle = Call(Kind.ALL_REDUCE, arrays, None, name="unequal", order=1).start()
    after = {number: start(rank, number) for number in mixed(rank, 1)[4:]}
    with pytest.raises(collective.Disagreement, match=r"'unequal'.*\[3\].*\[4\]"):
        handle.wait()
    for number, good in {**before, **after}.items():
        assert_summed(size, number, good.wait())


def test_an_idle_rank_burns_no_core(rank, size):
    """This holds between collectives, after the queues' threads have started."""
    assert_summed(size, 2, start(rank, 2).wait())
    collective.allreduce_async(np.array(rank)).wait()
    collective.barrier()
    assert_rests()
