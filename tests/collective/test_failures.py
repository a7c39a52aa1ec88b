"""Ranks that die, leave or do not come: no hang, and the others know who it was."""

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.launch import PYTHONPATH, STARTS_RANKS

pytestmark = STARTS_RANKS


class Ranks:
    """Processes of one job, started without a launcher that would end the rest."""

    def __init__(self, size, code, before=(), **variables):
        self.job = f"test {os.getpid()} {time.monotonic_ns()}"
        self.processes = []
        self.before = before  # words before the command
        self.add(range(size), size, code, **variables)

    def add(self, ranks, size, code, **variables):
        """Starts more."""
        self.processes += [
            subprocess.Popen(
                [*self.before, sys.executable, "-c", textwrap.dedent(code)],
                env={
                    **os.environ,
                    "PYTHONPATH": PYTHONPATH,
                    "COLLECTIVE_RANK": str(rank),
                    "COLLECTIVE_SIZE": str(size),
                    "COLLECTIVE_LOCAL_RANK": str(rank),
                    "COLLECTIVE_LOCAL_SIZE": str(size),
                    "COLLECTIVE_JOB": self.job,
                    "COLLECTIVE_TIMEOUT": "30",
                    **variables,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in ranks
        ]

    def finish(self, timeout=240):
        """Exit code, output and errors of each."""
        try:
            outputs = [
                process.communicate(timeout=timeout) for process in self.processes
            ]
        finally:
            for process in self.processes:
                process.kill()
        return [
            (process.returncode, out, err)
            for process, (out, err) in zip(self.processes, outputs, strict=True)
        ]


PRELUDE = """
    import os, signal, sys, time
    import numpy as np
    import collective
    collective.init()
    rank, size = collective.rank(), collective.size()
"""
# With these, a rank waits for what another has done, however slow that is: ``post`` makes
# a file in the folder that the variable POSTED names, ``hear`` waits until it is there.
POST = """
    def post(what):
        open(os.path.join(os.environ["POSTED"], what), "w").close()

    def hear(*posted):
        for what in posted:
            while not os.path.exists(os.path.join(os.environ["POSTED"], what)):
                time.sleep(0.01)
"""

# Reduces for ever, all sizes and paths; says how the end came.
LOOP = (
    PRELUDE
    + """
    print("ready", flush=True)
    arrays = [np.full(n, float(rank), np.float32) for n in (1, 3000, 300_000, 3_000_000)]
    try:
        while True:
            for array in arrays:
                result = collective.allreduce(array, collective.Sum)
                assert (result == size * (size - 1) / 2).all(), "wrong sum"
                handle = collective.allreduce_async(array)
                collective.broadcast(array, size - 1)
                handle.wait()
    except collective.PeerLost as error:
        print("lost:", error, flush=True)
        sys.exit(5)
    """
)


def shared_memory():
    return {name for name in os.listdir("/dev/shm") if "collective" in name}


def test_a_killed_rank_is_named_by_all_others_within_seconds():
    ranks = Ranks(3, LOOP)
    for process in ranks.processes:
        assert process.stdout.readline() == "ready\n"
    ranks.processes[1].kill()
    start = time.monotonic()
    results = ranks.finish()
    assert time.monotonic() - start < 20  # it takes 0.1 s; the machine may be busy
    for code, out, err in (results[0], results[2]):
        assert code == 5, out + err
        assert "rank 1 (process" in out and "died" in out and "HINT" in out


def test_kills_at_random_moments(request):
    """Four at a time; COLLECTIVE_KILLS=50 for the long run."""
    seed = int(os.environ.get("COLLECTIVE_SEED", "1"))
    generator = random.Random(seed)
    before = shared_memory()
    for _ in range(int(os.environ.get("COLLECTIVE_KILLS", "3"))):
        size = generator.choice([2, 3, 4])
        ranks = Ranks(size, LOOP, COLLECTIVE_START_TIMEOUT="3")
        victim = generator.randrange(size)
        time.sleep(generator.uniform(0, 0.8))  # from the start of Python on
        ranks.processes[victim].kill()
        for rank, (code, out, err) in enumerate(ranks.finish()):
            if rank == victim:
                assert code == -signal.SIGKILL
            else:
                assert code not in (0, None), (rank, out, err)
                text = out + err
                assert "lost:" in text or "init" in text, (seed, rank, victim, text)
    assert shared_memory() == before


@pytest.mark.matrix
def test_a_program_that_closes_all_descriptors_is_told_so(tmp_path):
    """Also where another file has got the number of the memory: it is not written."""
    code = (
        PRELUDE
        + """
    os.closerange(3, 256)
    if rank:  # every number is taken by a file of the program's own
        own = [os.open(sys.argv[0], os.O_RDWR | os.O_CREAT) for _ in range(64)]
        os.ftruncate(own[0], 1 << 24)
    try:
        collective.allreduce(np.full(3_000_000, float(rank)))
    except collective.CollectiveError as error:
        print(error)
        assert not rank or not any(os.pread(own[0], 1 << 24, 0))
    os._exit(0)
    """
    ).replace("sys.argv[0]", repr(str(tmp_path / "own")))
    for ended, out, err in Ranks(2, code).finish():
        assert ended == 0, err
        assert "of the memory that ranks share, was closed" in out, out
        assert "HINT: the program closes descriptors that it has not" in out
        assert "give each rank more memory" not in out


def test_a_rank_that_leaves_at_once_loses_no_sum():
    """It comes about when the others look whether it has left, which they do by turns."""
    code = """
    import random, time
    import numpy as np
    import collective
    draw = random.Random(1)
    for job in range(40):
        late, pause = draw.randrange(8), draw.choice([0.1, 0.2]) + draw.uniform(0, 0.012)
        collective.init()
        collective.barrier()
        time.sleep(pause if collective.rank() == late else 0)
        assert collective.allreduce(np.ones(5), collective.Sum)[0] == 8
        collective.shutdown()
    """
    for exit_code, out, err in Ranks(8, code, COLLECTIVE_RECORDER="off").finish(120):
        assert exit_code == 0, out + err


def test_a_rank_that_leaves_is_named():
    code = (
        PRELUDE
        + """
    collective.barrier()
    if rank == 0:
        sys.exit(0)
    try:
        collective.allreduce(np.ones(3))
    except collective.PeerLost as error:
        print(error)
    """
    )
    (code0, _, _), (code1, out, err) = Ranks(2, code).finish()
    assert (code0, code1) == (0, 0), err
    assert "rank 0 has shut down while others still wait" in out


def test_a_rank_that_does_not_come_ends_the_wait(tmp_path):
    code = (
        PRELUDE
        + POST
        + """
    if rank == 0:
        hear("timeout")
    try:
        collective.allreduce(np.ones(3), name="gradient")
    except collective.Timeout as error:
        print(error)
        post("timeout")
        sys.exit(3)
    """
    )
    results = Ranks(
        2,
        code,
        COLLECTIVE_TIMEOUT="3",
        COLLECTIVE_STALL_SECONDS="1",
        POSTED=str(tmp_path),
    ).finish()
    code, out, err = results[1]
    assert code == 3
    assert re.search(r"waited \d+ s for rank 0 in all-reduce 'gradient'", out), out
    assert "rank 0 is not in a collective" in out
    assert re.search(r"no progress for \d+ s", err), err
    assert "rank 1 waits for rank 0" in err
    assert results[0][0] == 3  # and the late one hears of it too


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
def test_names_that_never_meet_are_told_on_every_rank(plans, stall_seconds):
    """At once where the functions' plans differ; else after a while."""
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
def test_a_process_set_that_a_function_lacks_is_told_on_every_rank(wrong):
    """One rank takes another one; its peers go on until they need it."""
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
def test_tensorflow_tells_of_different_process_sets(decorator):
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
    """As when it is still computed: both ranks' functions have the same names."""
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
        # Those that meet before are none the worse for it.
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
def test_different_process_sets_are_told_on_every_rank(call):
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
    """No circle before the stall time: the other thread ends the wait of all."""
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


def test_a_rank_that_never_starts_is_named(tmp_path):
    # Both others are there before one of them begins to wait.
    code = (
        """
    import os, signal, time
    import collective
    rank = os.environ["COLLECTIVE_RANK"]
    if rank == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    """
        + POST
        + """
    post(rank)
    hear("0", "1")
    collective.init()
    """
    )
    ranks = Ranks(3, code, COLLECTIVE_START_TIMEOUT="3", POSTED=str(tmp_path))
    results = ranks.finish()
    for code, _, err in results[:2]:
        assert code == 1
        assert "local ranks did not come to init: 2" in err


def test_a_rank_of_another_launch_is_refused():
    first = Ranks(2, PRELUDE, COLLECTIVE_SIZE="3", COLLECTIVE_START_TIMEOUT="3")
    code, _, err = first.finish()[0]
    assert code == 1 and "HINT" in err


def test_a_fork_that_ends_does_not_leave_the_job():
    code = (
        PRELUDE
        + """
    if os.fork() == 0:
        sys.exit(0)  # runs what was registered for the end of the process
    os.wait()
    assert collective.allreduce(np.array(rank), collective.Max) == size - 1
    """
    )
    for exit_code, out, err in Ranks(2, code).finish():
        assert exit_code == 0, out + err


def test_unfinished_handles_end_at_shutdown(tmp_path):
    code = (
        PRELUDE
        + POST
        + """
    if rank == 0:
        from collective.recorder import memory

        def runs(entry):
            return entry.what == "first" and entry.started and not entry.ended

        handle = collective.allreduce_async(np.ones(3), name="first")
        later = collective.allreduce_async(np.ones(3))
        while not any(map(runs, memory.read(0, "", time.monotonic_ns()).entries)):
            time.sleep(0.01)
        collective.shutdown()
        post("shutdown")
        for one in (handle, later):
            try:
                one.wait()
            except collective.PeerLost as error:
                print(error)
    else:
        hear("shutdown")
    """
    )
    code, out, err = Ranks(2, code, POSTED=str(tmp_path)).finish()[0]
    assert code == 0, err
    assert "shut down while a collective ran" in out and "before it ran" in out


def test_a_job_can_part_and_meet_again():
    code = (
        PRELUDE
        + """
    for turn in range(5):
        assert collective.allreduce(np.array(rank + turn), collective.Max) == size - 1 + turn
        collective.shutdown()
        assert not collective.is_initialized()
        collective.init()
    """
    )
    for exit_code, out, err in Ranks(3, code).finish():
        assert exit_code == 0, out + err


@pytest.mark.parametrize("size", [2, 4])
def test_a_waiting_rank_leaves_its_core_to_others(size):
    code = (
        PRELUDE
        + """
    collective.barrier()
    before = time.process_time()
    if rank == 0:
        time.sleep(2)
    collective.barrier()
    print(time.process_time() - before)
    """
    )
    for exit_code, out, err in Ranks(size, code).finish():
        assert exit_code == 0, err
        assert float(out) < 0.5  # of two seconds; a spinning rank would use all


@pytest.mark.parametrize(
    ("instead", "code", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "rank 1 .* died"),
        (
            "hear('0', '2')",
            0,
            r"waited \d+ s for rank 1 in (join|all-gather 'which)",
        ),
    ],
    ids=["dies", "does not come"],
)
def test_ranks_that_have_joined_do_not_wait_for_ever(instead, code, message, tmp_path):
    ranks = Ranks(
        3,
        PRELUDE
        + POST
        + f"""
    if rank == 1:
        {instead}
        sys.exit()
    try:
        collective.join()
    finally:
        post(str(rank))
    """,
        COLLECTIVE_TIMEOUT="3",
        POSTED=str(tmp_path),
    )
    (_, _, first), (ended, _, _), (_, _, last) = ranks.finish()
    assert ended == code
    for error in (first, last):
        assert re.search(message, error), error


def test_ranks_of_one_function_wait_for_a_slow_one():
    """Also in the first step of an all-gather, whose name is not the one traced."""
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
    ranks = Ranks(3, code, COLLECTIVE_STALL_SECONDS="1")
    for exit_code, out, err in ranks.finish(timeout=400):
        assert exit_code == 0, out + err
        assert "[2. 2. 1. 1. 2. 2.]" in out, out + err
