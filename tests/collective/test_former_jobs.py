"""Sets of a former job and forks of a rank must not take part in a job."""

import sys

import pytest

from tests.launch import STARTS_RANKS, capture, environment

pytestmark = STARTS_RANKS


def run(script):
    command = [sys.executable, "-m", "collective.launch", "-np", "3"]
    ended = capture(
        [*command, sys.executable, "-c", script],
        150,
        env=environment(forked=True, COLLECTIVE_TIMEOUT="240"),
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


FORMER = """
import numpy as np, tensorflow as tf, collective
import collective.tensorflow as hvd
from collective import tensorflow_ops
from collective.tensorflow_ops import ranks
from collective.errors import CollectiveError
collective.init()
rank = collective.rank()
old = collective.ProcessSet([0, 1])

@tf.function
def within(x):
    (total,) = tensorflow_ops.all_reduce([x], collective.Sum, process_set=old)
    return total, ranks.size(old)

def refused(call):
    try:
        call()
    except (CollectiveError, tf.errors.InvalidArgumentError) as error:
        assert "belongs to a former job" in str(error) and "HINT: " in str(error)
        return
    raise AssertionError("a set of a former job was used")

x = tf.constant([1.0 + rank])
if rank < 2:
    total, size = within(x)
    assert (float(total[0]), int(size)) == (3.0, 2)
collective.shutdown()
collective.init()
new = collective.ProcessSet([0, 1, 2])
assert collective.allreduce(np.array(1), collective.Sum, process_set=new) == 3
if rank < 2:
    refused(lambda: collective.allreduce(np.ones(1), process_set=old))
    refused(lambda: collective.allgather(np.ones(1), process_set=old))
    refused(lambda: collective.barrier_async(process_set=old))
    refused(lambda: within(x))
refused(lambda: ranks.size(old))
assert collective.allreduce(np.array(rank), collective.Sum) == 3
print("former sets are refused", flush=True)
"""


def test_a_process_set_of_a_former_job_is_refused():
    pytest.importorskip("tensorflow")
    assert run(FORMER).count("former sets are refused") == 3


FORKS = """
import os, signal, sys, time
import numpy as np
import collective
from collective.errors import CollectiveError
collective.init()
rank = collective.rank()

def total(value):
    return int(collective.allreduce(np.array([value]), collective.Sum)[0])

def forked(action):
    child = os.fork()
    if child == 0:
        action()
        sys.exit(0)  # with all that runs at the end of a process
    for _ in range(6000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"

def calls():
    x = np.ones(3)
    refused = 0
    for call in (
        lambda: collective.allreduce(x),
        lambda: collective.allgather_async(x),
        lambda: collective.barrier(),
        lambda: collective.join(),
        lambda: collective.ProcessSet([0, 1]),
        lambda: pending.wait(),
    ):
        try:
            call()
        except CollectiveError as error:
            refused += f"is a fork of rank {rank}, and not a rank" in str(error)
            refused += "HINT: call collectives in the process that" in str(error)
    assert refused == 12, refused
    # It may still ask for its identity, as workers that load data do.
    assert (collective.rank(), collective.size()) == (rank, 3)

assert total(10 ** rank) == 111
if rank < 2:
    pending = collective.allreduce_async(np.array([rank + 1]), collective.Sum)
    assert forked(calls) == 0
    assert forked(lambda: None) == 0
    assert forked(lambda: collective.shutdown()) == 0
    time.sleep(1)  # the others wait meanwhile, and look whether this one is there
else:
    pending = collective.allreduce_async(np.array([rank + 1]), collective.Sum)
assert int(pending.wait()[0]) == 6
assert total(2 * 10 ** rank) == 222
collective.shutdown()
# A fork of a process outside of every job may join one.
os.environ.clear()

def alone():
    collective.init()
    assert total(5) == 5

assert forked(alone) == 0
print("forks are refused", flush=True)
"""


def test_a_fork_of_a_rank_is_refused_and_leaves_no_job():
    assert run(FORKS).count("forks are refused") == 3
