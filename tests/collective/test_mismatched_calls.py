"""Ranks that wait for each other in calls that do not match: an error on every rank, no hang."""

import re
from pathlib import Path

import pytest

from tests.collective.unlaunched_ranks import PRELUDE, Ranks
from tests.launch import STARTS_RANKS, environment

pytestmark = STARTS_RANKS


BY_NAME = (
    PRELUDE
    + """
    from collective import library
    from collective.operations.call import Call
    from collective.operations.kinds import Kind

    from collective.process_set import members

    def plan(function, *names, process_set=None):
        group = members(process_set)[0]
        for name in names:
            library.load().collective_plan(7, group, function.encode(), name.encode())

    def start(name, process_set=None):
        out = np.empty(3)
        arrays = [(np.full(3, float(rank)), out)]
        made = {"name": name, "process_set": process_set, "order": 1, "plan": 7}
        return Call(Kind.ALL_REDUCE, arrays, out, **made).start()
    """
)


@pytest.mark.parametrize(
    ("plans", "stall_seconds"),
    [
        ("", "1"),
        ("plan('step', *(['weights', 'biases'] if rank else ['biases']))", "60"),
    ],
)
def test_names_that_never_meet_are_reported_on_every_rank(plans, stall_seconds):
    """The report is immediate if the functions' plans differ, and late otherwise."""
    code = (
        BY_NAME
        + f"""
    {plans}
    handle = start("weights" if rank else "biases")
    try:
        handle.wait()
    except collective.Disagreement as error:
        print(error)
    """
    )
    ranks = Ranks(3, code, COLLECTIVE_STALL_SECONDS=stall_seconds)
    for exit_code, out, err in ranks.finish():
        assert exit_code == 0, out + err
        assert "has all-reduce 'weights' sum float64[3]" in out, out
        assert "rank 0 has begun 'biases'" in out and "HINT" in out, out


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_process_set_that_a_function_lacks_is_reported_on_every_rank(wrong):
    """One rank uses another set; its peers continue until they need it."""
    code = (
        BY_NAME
        + f"""
    pairs = [collective.ProcessSet(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    right, mistaken = pairs[({wrong} + 1) % 3], pairs[{wrong}]
    mine = mistaken if rank == {wrong} else right
    assert mine.included()
    plan("step", "weights", process_set=mine)
    plan("step", "biases")
    try:
        while True:
            handles = [start("weights", mine), start("biases")]
            for handle in handles:
                handle.wait()
    except collective.Disagreement as error:
        print(error)
    """
    )
    peer = (wrong + 1) % 3
    members = ",".join(map(str, sorted((wrong, peer))))
    for exit_code, out, err in Ranks(3, code).finish():
        assert exit_code == 0, out + err
        assert re.search(
            rf"rank {wrong} waits for rank {peer} in all-reduce 'weights' sum "
            rf"float64.3. among ranks {members}; rank {peer} has traced the same",
            out,
        ), out


@pytest.mark.matrix
@pytest.mark.parametrize("decorator", ["", "@tf.function"], ids=["eager", "function"])
def test_tensorflow_reports_different_process_sets(decorator):
    code = f"""
    import tensorflow as tf
    import collective.tensorflow as hvd

    pair, other = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[pair, other])
    mine = other if hvd.rank() else pair

    {decorator}
    def step(x):
        rows = hvd.allgather(x, name="rows")
        hvd.allreduce(x, name="weights", process_set=mine)
        return rows + hvd.allreduce(x, name="biases")[0]

    try:
        for _ in range(2):
            step(tf.ones(3))
    except tf.errors.FailedPreconditionError as error:
        print(error)
    """
    ranks = Ranks(3, code, COLLECTIVE_STALL_SECONDS="5")
    for exit_code, out, err in ranks.finish(timeout=400):
        assert exit_code == 0, out + err
        assert re.search(
            r"rank 0 waits for rank 1 since \d+ s in all-reduce 'weights' .*ranks 0,1",
            out,
        ), out


def test_a_collective_that_is_long_in_coming_is_waited_for():
    """It may still be computed, since both ranks' functions have the same names."""
    code = (
        BY_NAME
        + """
    plan("step", "weights", "biases")
    first = start("biases" if rank else "weights")
    time.sleep(2)
    second = start("weights" if rank else "biases")
    assert (first.wait() == 1).all() and (second.wait() == 1).all()
    """
    )
    for exit_code, out, err in Ranks(2, code, COLLECTIVE_STALL_SECONDS="0.3").finish():
        assert exit_code == 0, out + err


@pytest.mark.parametrize(
    "call",
    [
        "collective.allreduce(np.ones(3), name='weights', process_set=mine)",
        # Earlier collectives are not affected.
        """(
            collective.allreduce_async(np.ones(3)).wait(),
            collective.allreduce_async(np.ones(3), name='weights', process_set=mine).wait(),
        )""",
        # The second waits for its turn.
        """(
            collective.allreduce_async(np.ones(3), name='weights', process_set=mine),
            collective.allreduce(np.ones(3), name='biases', process_set=mine),
        )""",
    ],
    ids=["blocking", "handle", "both"],
)
def test_different_process_sets_are_reported_on_every_rank(call):
    code = (
        PRELUDE
        + f"""
    first, second = collective.ProcessSet([0, 1]), collective.ProcessSet([1, 2])
    third = collective.ProcessSet([0, 2])
    mine = [first, second, third][rank]
    try:
        {call}
    except collective.Disagreement as error:
        print(error)
    """
    )
    for exit_code, out, err in Ranks(3, code, COLLECTIVE_STALL_SECONDS="1").finish():
        assert exit_code == 0, out + err
        for rank, ranks in enumerate(["0,1", "1,2", "0,2"]):
            assert re.search(
                rf"rank {rank} waits .* 'weights' .* among ranks {ranks}", out
            ), out
        assert "HINT" in out


def test_handles_that_wait_for_a_slow_rank_are_no_circle():
    code = (Path(__file__).parent / "ranks_no_circle.py").read_text()
    for exit_code, out, err in Ranks(3, code, COLLECTIVE_STALL_SECONDS="0.3").finish():
        assert exit_code == 0, out + err


def test_a_second_thread_may_call_late():
    """No deadlock is reported before the stall time: the other thread ends all waits."""
    code = (
        PRELUDE
        + """
    import threading

    sets = [collective.ProcessSet([0, 1]) for _ in range(2)]
    mine, other = sets[rank], sets[1 - rank]

    def later():
        time.sleep(8)
        collective.allreduce(np.ones(3), collective.Sum, process_set=other)

    thread = threading.Thread(target=later)
    thread.start()
    x = collective.allreduce(np.full(3, rank + 1.0), collective.Sum, process_set=mine)
    thread.join()
    """
    )
    more = {"COLLECTIVE_STALL_SECONDS": "40", "COLLECTIVE_TIMEOUT": "80"}
    for exit_code, out, err in Ranks(2, code, **more).finish():
        assert exit_code == 0, out + err


def test_ranks_of_one_function_wait_for_a_slow_one():
    """This holds also in the first step of an all-gather, which has another name."""
    code = """
    import time
    import tensorflow as tf
    import collective.tensorflow as hvd

    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])

    @tf.function
    def step(x):
        if pair.included():
            x = hvd.allreduce(x, op=hvd.Sum, name="weights", process_set=pair)
        return hvd.allgather(x, name="rows")

    time.sleep(4 if hvd.rank() == 2 else 0)
    print(step(tf.ones(2)).numpy())
    """
    variables = environment(forked=True, COLLECTIVE_STALL_SECONDS="1")
    ranks = Ranks(3, code, **variables)
    for exit_code, out, err in ranks.finish(timeout=400):
        assert exit_code == 0, out + err
        assert "[2. 2. 1. 1. 2. 2.]" in out, out + err
