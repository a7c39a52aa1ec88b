"""Survivors of a broken job meet again, even if more ranks die during that."""

import signal
import sys

import pytest

from tests import launch
from tests.collective.unlaunched_ranks import PRELUDE, Ranks

pytestmark = launch.STARTS_RANKS

# Ranks die as DEATHS says: before a given step, or while they meet again for the first
# time. The survivors print who they are.
LOOP = (
    PRELUDE
    + """
    import threading
    from collective import session

    who, alive, step, meetings = rank, list(range(size)), 0, 0
    deaths = dict(pair.split(":") for pair in os.environ["DEATHS"].split())
    mine = deaths.get(str(who))
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)
    array = np.arange(300_000.0) * (who + 1)
    lost = False
    while step < 20:
        try:
            if lost:
                meetings += 1
                if mine == "meeting":
                    threading.Timer(0.002 * who, die).start()
                alive = [alive[former] for former in session.regroup()]
                step = int(collective.allgather(np.array([step])).max())
                lost = False
            if mine == str(step) or (mine == "meeting" and step == 19):
                die()
            result = collective.allreduce(array, collective.Sum)
            wanted = np.arange(300_000.0) * sum(other + 1 for other in alive)
            assert (result == wanted).all(), "wrong sum"
            step += 1
        except collective.PeerLost:
            assert session.lost()
            lost = True
    print(alive, collective.rank(), collective.size(), meetings > 0)
    """
)


@pytest.mark.parametrize(
    ("deaths", "left"),
    [
        ("3:5 0:meeting 1:meeting", [2]),
        ("0:3 1:9 2:9", [3]),
    ],
)
def test_those_that_are_left_go_on(deaths, left):
    ended = Ranks(4, LOOP, DEATHS=deaths).finish()
    for rank, (code, out, err) in enumerate(ended):
        if rank in left:
            assert (
                out.split("\n")[0] == f"{left} {left.index(rank)} {len(left)} True"
            ), err
            assert code == 0
        else:
            assert code == -signal.SIGKILL, err


ENDS_BEFORE = """
import os, signal
if os.environ["COLLECTIVE_RANK"] in "02":
    os.kill(os.getpid(), signal.SIGKILL)
import collective
collective.init()
print(collective.rank(), collective.size(), collective.local_size(), flush=True)
collective.barrier()
"""


def test_those_that_ended_before_they_came_are_left_out():
    """The launcher reports the ended ranks to the others."""
    start = [*launch.command("native", 4), "--min-np", "2"]
    command = [*start, sys.executable, "-c", ENDS_BEFORE]
    code, printed = launch.run(command, launch.environment(), 60)
    assert code == 0 and "[1] 0 2 2" in printed and "[3] 1 2 2" in printed, printed


# Newcomers ask to join, and all but the last die at some time of joining.
GROWS = (
    PRELUDE
    + """
    import threading
    from collective import session

    who, last = int(os.environ["COLLECTIVE_RANK"]), 12
    if session.is_joining():
        if who != last:
            die = lambda: os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(0.0005 * (who - 1), die).start()
        session.enter()
    there = []
    while last not in there:
        try:
            states = collective.allgather(np.array([[who, session.waiting()]]))
            there, waiting = states.T.tolist()
            if any(waiting):
                session.regroup()
        except collective.PeerLost:
            session.regroup()
    print(there)
    """
)


def test_newcomers_that_die_stop_nobody():
    variables = {"COLLECTIVE_MAX_NP": "16"}
    ranks = Ranks(2, GROWS, **variables)
    variables["COLLECTIVE_JOINS"] = "1"
    for who in range(2, 12, 2):  # two at a time
        ranks.add((who, who + 1), 16, GROWS, **variables)
        assert [one.wait(240) for one in ranks.processes[-2:]] == [-signal.SIGKILL] * 2
    ranks.add([12], 16, GROWS, **variables)
    ended = ranks.finish()
    left = [ended[rank] for rank in (0, 1, 12)]
    assert [out for _, out, _ in left] == ["[0, 1, 12]\n"] * 3, ended
    assert [code for code, _, _ in left] == [0] * 3, ended


def test_a_job_that_is_whole_is_not_lost():
    code = (
        PRELUDE
        + """
    from collective import session
    collective.barrier()
    print(session.lost())
    """
    )
    assert [out for _, out, _ in Ranks(2, code).finish()] == ["False\n"] * 2
