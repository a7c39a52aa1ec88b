"""The tests of the collectives, on hosts that only messages connect."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest

from tests import launch

FOLDER = "tests/collective"
FILES = [
    f"{FOLDER}/test_{name}.py"
    for name in ("allreduce", "data_movement", "process_sets", "agreement")
]


# A host with two ranks and a host with one rank have only one lane.
@pytest.mark.parametrize(
    "slots, rate", [([2, 2], "1gbit"), ([2, 1], "10gbit")], ids=["2+2", "2+1"]
)
def test_on_two_hosts(slots, rate, hosts, tmp_path):
    with hosts.at(rate):
        run_on(hosts, slots, FILES, tmp_path)


def test_on_four_hosts(hosts, tmp_path):
    run_on(hosts, [1, 1, 1, 1], FILES, tmp_path)


def test_tensorflow_and_the_backend_on_two_hosts(hosts, tmp_path):
    files = [f"{FOLDER}/test_{name}.py" for name in ("tensorflow", "backend")]
    run_on(hosts, [2, 2], [*files, "-k", "not many_runs and not idle"], tmp_path)


SENDS = """
import json
from pathlib import Path
import numpy as np
import collective

BYTES = 16 << 20

def sent():
    lines = Path("/proc/net/dev").read_text().splitlines()
    (eth0,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(eth0.split(":")[1].split()[8])

collective.init()
array, shares = np.full(BYTES // 4, collective.rank(), np.float32), {}
for algorithm in ("auto", "hierarchical", "direct"):
    collective.barrier()
    before = sent()
    total = collective.allreduce(array, collective.Sum, algorithm=algorithm)
    collective.barrier()
    shares[algorithm] = (sent() - before) / BYTES
    assert (total == 6).all()
if collective.rank() == 0:
    print("shares", json.dumps(shares), flush=True)
collective.barrier()
"""


def test_hierarchical_is_what_sums_across_hosts(hosts):
    """The bytes on the wire show it: all others send l times as much, for l ranks a host."""
    command = hosts.mpirun([2, 2], [sys.executable, "-c", SENDS])
    code, printed = launch.run(command, launch.environment(), 60)
    assert code == 0, printed
    (line,) = (x for x in printed.splitlines() if x.startswith("shares "))
    sent = json.loads(line.removeprefix("shares "))
    # 2(h-1)/h of the message, and headers; repeated packets are added.
    assert 0.95 < sent["auto"] < 1.5, sent
    assert 0.95 < sent["hierarchical"] < 1.5, sent
    assert sent["direct"] > 1.9, sent


def run_on(lab, slots, tests, tmp_path):
    ended = launch.launch(
        "native",
        sum(slots),
        tests,
        tmp_path,
        seconds=200,
        start=partial(lab.mpirun, slots),
    )
    assert ended.passed(skips=True) > 20
