"""Time in which a rank was suspended does not count for the deadline of init."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time

from meeting import rank

from collective.net import shared_secret
from tests.launch import STARTS_RANKS

pytestmark = STARTS_RANKS
START_TIMEOUT = 8  # many times the duration of init, but not of Python's start


def begun(number: int, job: str, of: int):
    """Return a rank that joins the others as soon as it reads a line."""
    program = f"""
        import os
        os.environ["COLLECTIVE_START_TIMEOUT"] = "{START_TIMEOUT}"
        import collective
        print("begins", flush=True)
        input()
        collective.init()
        print("met", collective.rank(), collective.size(), flush=True)
    """
    return rank(number, job, of=of, program=program, stdin=subprocess.PIPE)


def goes_on(one: subprocess.Popen):
    one.stdin.write("\n")
    one.stdin.flush()


def test_ranks_that_were_suspended_in_init_still_meet():
    """In one job ranks 0 and 1 wait for rank 2, in another rank 1 for rank 0."""
    first, second = shared_secret.generate(), shared_secret.generate()
    with contextlib.ExitStack() as stack:

        def start(number: int, job: str, of: int):
            started = begun(number, job, of)
            stack.callback(started.kill)
            return started

        waiting = [start(0, first, 3), start(1, first, 3), start(1, second, 2)]
        late = [start(2, first, 3), start(0, second, 2)]
        for one in (*waiting, *late):
            assert one.stdout.readline() == "begins\n"
        for one in waiting:
            goes_on(one)
        time.sleep(0.5)
        for one in waiting:
            one.send_signal(signal.SIGSTOP)
        time.sleep(START_TIMEOUT + 2)
        for one in waiting:
            one.send_signal(signal.SIGCONT)
        for one in late:
            goes_on(one)
        printed = [one.communicate(timeout=240)[0] for one in (*waiting, *late)]
    expected = ["met 0 3", "met 1 3", "met 1 2", "met 2 3", "met 0 2"]
    assert [text.split("\n")[-2] for text in printed] == expected, printed
