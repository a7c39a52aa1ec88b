"""Hosts that join and leave a training: its next generation continues with the same trace."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import keras
import numpy as np
import pytest

from collective import backends
from collective.training.observers.ledger.verify import check
from tests import launch
from tests.hosts.lab import NETWORK
from tests.hosts.ranks_renewed import STEPS, announce
from tests.training.small import everything, rows, train

SCRIPT = str(Path(__file__).with_name("ranks_renewed.py"))
ONE, TWO, THREE = (f"{NETWORK}.{n}:1" for n in (1, 2, 3))


def start(hosts, folder: Path, first: str, *command: str) -> str:
    """What the job printed; it ends well, and leaves nothing where hosts keep a state."""
    announce(folder, first)
    words = ["--min-np", "1", "--max-np", "3"]
    words += ["--host-discovery-script", f"cat {folder / 'hosts'}"]
    whole = hosts.ours("collective.launch", *words, sys.executable, *command)
    with tempfile.TemporaryDirectory() as states:  # apart from other jobs' states
        code, printed = launch.run(whole, launch.environment(TMPDIR=states), 150)
        assert code == 0, printed
        assert not list(Path(states).glob("collective-*")), printed
    return printed


def test_a_host_falls_silent(hosts, undisturbed, tmp_path):
    """mpirun ends the ranks; the job restarts without it, from a checkpoint."""
    words = ["-H", f"{ONE},{TWO}", "--min-np", "1", "--heartbeat", "4"]
    program = [sys.executable, SCRIPT, "native", str(tmp_path), "cut"]
    command = hosts.ours("collective.launch", *words, *program)
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        ended = pool.submit(launch.run, command, launch.environment(), 150)
        while not (tmp_path / "cut").exists() and not ended.done():
            time.sleep(0.05)
        stack.enter_context(hosts.cut(2))
        code, printed = ended.result()
    hosts.end_all()
    assert code == 0, printed
    assert f"{NETWORK}.2 is left out: " in printed
    assert "resumed from " in printed
    results = json.loads((tmp_path / "result.json").read_text())
    np.testing.assert_allclose(results["losses"], undisturbed, rtol=1e-12)
    assert results["size"] == 1 and check(tmp_path / "ledger").faults == []


@pytest.fixture(scope="module")
def undisturbed():
    keras.config.set_floatx("float64")
    try:
        single = backends.get("single")
        return train(single, steps=STEPS, model=everything(), data=rows()).losses
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.parametrize(
    ("backend", "first", "then", "replicas"),
    [
        # A host comes, another one goes.
        ("native", f"{ONE},{TWO}", [f"{ONE},{TWO},{THREE}", f"{ONE},{THREE}"], [2, 3, 2]),
        # From this host alone to two, and the one that has begun goes.
        ("native", f"{ONE}", [f"{ONE},{TWO}", TWO], [1, 2, 1]),
        # Rank 0 dies; another one is started in its place.
        ("mpi", f"{ONE},{TWO}", ["kill"], [2, 1, 2]),
        # It leaves when it is asked to.
        ("native", f"{ONE},{TWO}", ["leave"], [2, 1, 2]),
    ],
    ids=["comes and goes", "all others", "killed", "left"],
)  # fmt: skip
def test_hosts_come_and_go(
    backend, first, then, replicas, hosts, undisturbed, tmp_path
):
    printed = start(hosts, tmp_path, first, SCRIPT, backend, str(tmp_path), *then)
    results = json.loads((tmp_path / "result.json").read_text())
    np.testing.assert_allclose(results["losses"], undisturbed, rtol=1e-12)
    assert results["size"] == replicas[-1], printed
    found = check(tmp_path / "ledger")
    assert found.faults == []
    had = [run.replicas for run in found.runs]
    assert [n for i, n in enumerate(had) if had[i - 1 : i] != [n]] == replicas, printed
    assert f"collective: generation {len(then)}: {replicas[-1]} rank" in printed
    assert list((tmp_path / "runs").glob(f"step-{STEPS:09d}"))


def test_an_elastic_function_goes_on_in_the_next_round(hosts, tmp_path):
    program = "tests/hosts/ranks_elastic.py"
    words = [program, "renew", str(tmp_path), f"{ONE},{TWO},{THREE}"]
    printed = start(hosts, tmp_path, f"{ONE},{TWO}", *words)
    for rank in range(3):
        assert f"36.0 {[2, 2, 2, 3, 3, 3, 3, 3]} {rank}" in printed, printed
