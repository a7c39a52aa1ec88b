"""Calls that never meet, between hosts: reported on every rank, long before the deadline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import launch

# mpirun ends the others if one ends without MPI_Finalize.
AWAITS = """
import sys, time
from pathlib import Path

def await_others(rank):
    Path(sys.argv[1], str(rank)).touch()
    while len(list(Path(sys.argv[1]).iterdir())) < 3:
        time.sleep(0.01)
"""

CIRCLE = """
import numpy as np
import collective

collective.init()
rank = collective.rank()
sets = [collective.ProcessSet(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
try:
    collective.{call}
except collective.Disagreement as error:
    print(error, flush=True)
    await_others(rank)
"""

TENSORFLOW = """
import tensorflow as tf
import collective.tensorflow as hvd

pair, other = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 2])
hvd.init(process_sets=[pair, other])
mine = other if hvd.rank() else pair

DECORATOR
def step(x):
    rows = hvd.allgather(x, name="rows")
    hvd.allreduce(x, name="weights", process_set=mine)
    return rows + hvd.allreduce(x, name="biases")[0]

try:
    for _ in range(2):
        step(tf.ones(3))
except tf.errors.FailedPreconditionError as error:
    print(error, flush=True)
    await_others(hvd.rank())
"""


@pytest.mark.parametrize(
    "call",
    [
        "allreduce(np.ones(3), name='weights', process_set=sets[rank])",
        "allreduce_async(np.ones(3), name='weights', process_set=sets[rank]).wait()",
    ],
    ids=["blocking", "handle"],
)
def test_a_circle_of_process_sets_is_reported_on_every_rank(call, hosts, tmp_path):
    printed = ended(hosts, CIRCLE.format(call=call), tmp_path)
    # The dump of a stall names waits, too: only the errors count.
    errors = printed.split("ranks wait for each other in different collectives:")[1:]
    for rank, awaited, ranks in [(0, 1, "0,1"), (1, 2, "1,2"), (2, 0, "0,2")]:
        waits = f"rank {rank} waits for rank {awaited} in all-reduce 'weights' average"
        line = f"{waits} float64[3] among ranks {ranks}"
        assert [e.split("HINT")[0].count(line) for e in errors] == [1, 1, 1], printed


@pytest.mark.parametrize("decorator", ["", "@tf.function"], ids=["eager", "function"])
def test_tensorflow_reports_different_process_sets(decorator, hosts, tmp_path):
    """Rank 0 waits for rank 2, on the other host, which uses another set."""
    printed = ended(hosts, TENSORFLOW.replace("DECORATOR", decorator), tmp_path)
    waits = "rank 0 waits for rank 2 in all-reduce 'weights' average float32[3]"
    assert printed.count(f"{waits} among ranks 0,2") >= 3, printed


def test_ranks_that_wait_for_a_slow_one_are_no_circle(hosts):
    script = launch.ROOT / "tests/collective/ranks_no_circle.py"
    stall = "COLLECTIVE_STALL_SECONDS"
    command = hosts.mpirun([2, 1], [sys.executable, str(script)], "-x", stall)
    impatient = launch.environment(**{stall: "0.3"})
    code, printed = launch.run(command, impatient, 60)
    assert code == 0, printed


def ended(lab, script: str, folder: Path) -> str:
    """Return the output of ranks 0 and 1 on one host and 2 on another."""
    variable = "COLLECTIVE_STALL_SECONDS"
    program = [sys.executable, "-c", AWAITS + script, str(folder)]
    command = lab.mpirun([2, 1], program, "-x", variable)
    env = launch.environment(forked="tensorflow" in script, **{variable: "5"})
    code, printed = launch.run(command, env, 90)
    assert code == 1, printed
    return printed
