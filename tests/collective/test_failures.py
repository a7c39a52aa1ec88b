"""Ranks that die, leave or never join: no hang, and the error names the rank."""

import os
import random
import re
import signal
import time

import pytest

from tests.collective.unlaunched_ranks import POST, PRELUDE, Ranks
from tests.launch import STARTS_RANKS

pytestmark = STARTS_RANKS


# Reduces for ever, all sizes and paths; prints how it ended.
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
    """Four kills run at a time; COLLECTIVE_KILLS=50 makes the long run."""
    seed = int(os.environ.get("COLLECTIVE_SEED", "1"))
    generator = random.Random(seed)
    before = shared_memory()
    for _ in range(int(os.environ.get("COLLECTIVE_KILLS", "3"))):
        size = generator.choice([2, 3, 4])
        ranks = Ranks(size, LOOP, COLLECTIVE_START_TIMEOUT="3")
        victim = generator.randrange(size)
        time.sleep(generator.uniform(0, 0.8))  # counted from the start of Python
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
def test_a_program_that_closes_all_descriptors_gets_an_error(tmp_path):
    """If another file has the number of the memory, that file is not written."""
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
    """A sum could be lost when the others check whether it has left, which they do in turn."""
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
    assert results[0][0] == 3  # and the late one gets the error, too


def test_a_rank_that_never_starts_is_named(tmp_path):
    # Both others exist before one of them begins to wait.
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
        while not any(map(runs, memory.read_rank(0, "", time.monotonic_ns()).entries)):
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
        # A spinning rank would use all of the two seconds.
        assert float(out) < 0.5


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
