"""Hosts that join and leave a training: its next generation continues with the same trace."""

from __future__ import annotations

import json
import os
import signal
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
from tests.hosts.ranks_overlapping import ANNOUNCED_AT, FAILURES
from tests.hosts.ranks_renewed import STEPS, announce, train_on_arrays
from tests.hosts.test_launching import is_launcher
from tests.training.small import everything, rows, train

SCRIPT = str(Path(__file__).with_name("ranks_renewed.py"))
OVERLAPPING = str(Path(__file__).with_name("ranks_overlapping.py"))
ONE, TWO, THREE = (f"{NETWORK}.{n}:1" for n in (1, 2, 3))


def start(hosts, folder: Path, first: str, *command: str) -> str:
    """Run a job that ends well, and leaves no kept state; return its output."""
    announce(folder, first)
    words = ["--min-np", "1", "--max-np", "3"]
    words += ["--host-discovery-script", f"cat {folder / 'hosts'}"]
    whole = hosts.ours("collective.launch", *words, sys.executable, *command)
    with tempfile.TemporaryDirectory() as states:  # separate from other jobs' states
        env = launch.environment(forked=True, TMPDIR=states)
        code, printed = launch.run(whole, env, 150)
        assert code == 0, printed
        assert not list(Path(states).glob("collective-*")), printed
    return printed


def test_a_host_falls_silent(hosts, undisturbed, tmp_path):
    """mpirun ends the ranks; the job restarts without it, from a checkpoint."""
    words = ["-H", f"{ONE},{TWO}", "--min-np", "1", "--heartbeat", "4"]
    program = [sys.executable, SCRIPT, "native", str(tmp_path), "cut"]
    command = hosts.ours("collective.launch", *words, *program)
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        env = launch.environment(forked=True)
        ended = pool.submit(launch.run, command, env, 150)
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
def float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.fixture(scope="module")
def undisturbed(float64):
    single = backends.get("single")
    return train(single, steps=STEPS, model=everything(), data=rows()).losses


@pytest.fixture(scope="module")
def of_arrays(float64):
    return train_on_arrays(backends.get("single")).losses


@pytest.mark.parametrize(
    ("backend", "first", "then", "replicas"),
    [
        # A host joins, another leaves.
        ("native", f"{ONE},{TWO}", [f"{ONE},{TWO},{THREE}", f"{ONE},{THREE}"], [2, 3, 2]),
        # The job grows from this host to two, and then this host leaves.
        ("native", f"{ONE}", [f"{ONE},{TWO}", TWO], [1, 2, 1]),
        # Rank 0 dies; a new rank replaces it.
        ("mpi", f"{ONE},{TWO}", ["kill"], [2, 1, 2]),
        # It leaves on request.
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


@pytest.mark.parametrize(
    "then",
    [[f"{ONE},{TWO},{THREE}", f"{ONE},{THREE}"], ["leave"]],
    ids=["comes and goes", "left"],
)
def test_hosts_come_and_go_in_a_training_of_arrays(then, hosts, of_arrays, tmp_path):
    """The next generation traces its first step before it takes the state."""
    command = SCRIPT, "native:arrays", str(tmp_path), *then
    printed = start(hosts, tmp_path, f"{ONE},{TWO}", *command)
    results = json.loads((tmp_path / "result.json").read_text())
    np.testing.assert_allclose(results["losses"], of_arrays, rtol=1e-12)
    assert f"collective: generation {len(then)}: " in printed


def made(folder: Path) -> list[tuple[int, int]]:
    """Return number and generation of each step."""
    lines = (folder / "steps").read_text().splitlines()
    return [(int(step), int(generation)) for step, generation in map(str.split, lines)]


@pytest.mark.parametrize("first", [ONE, f"{ONE},{TWO}"], ids=["one", "two"])
def test_the_job_trains_while_the_next_generation_starts(
    first, hosts, undisturbed, tmp_path
):
    after = f"{first},{THREE}"
    printed = start(
        hosts, tmp_path, first, OVERLAPPING, "hands over", str(tmp_path), after
    )
    steps = made(tmp_path)
    assert [number for number, _ in steps] == list(range(1, STEPS + 1)), printed
    results = json.loads((tmp_path / "result.json").read_text())
    np.testing.assert_allclose(results["losses"], undisturbed, rtol=1e-12)
    found = check(tmp_path / "ledger")
    assert found.faults == []
    replicas = after.count(",") + 1
    assert [run.replicas for run in found.runs] == [replicas - 1, replicas], printed
    began = next(i for i, (_, generation) in enumerate(steps) if generation == 1)
    assert began > ANNOUNCED_AT + 1, "no step was made meanwhile"


def test_a_rank_dies_while_the_next_generation_starts(hosts, undisturbed, tmp_path):
    """The others continue; the next generation fills its place."""
    first = f"{ONE},{TWO}"
    command = OVERLAPPING, "killed", str(tmp_path), f"{first},{THREE}"
    printed = start(hosts, tmp_path, first, *command)
    results = json.loads((tmp_path / "result.json").read_text())
    np.testing.assert_allclose(results["losses"], undisturbed, rtol=1e-12)
    found = check(tmp_path / "ledger")
    assert found.faults == []
    assert [run.replicas for run in found.runs] == [2, 1, 3], printed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_both_generations_end_with_the_launcher(number, hosts, tmp_path):
    announce(tmp_path, ONE)
    words = ["--min-np", "1", "--max-np", "3"]
    words += ["--host-discovery-script", f"cat {tmp_path / 'hosts'}", sys.executable]
    words += [OVERLAPPING, "stays", str(tmp_path), f"{ONE},{TWO}"]
    command = hosts.ours("collective.launch", *words)
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(launch.run, command, launch.environment(), 60)
        try:
            launch.await_that(lambda: list(tmp_path.glob("try-*")) or ended.done())
            (launcher,) = [p for p in hosts.processes() if is_launcher(p)]
            os.kill(launcher, number)
            code, printed = ended.result()
            launch.await_that(lambda: not hosts.processes())
        finally:
            hosts.end_all()
    assert code != 0, printed
    assert "has failed" not in printed, printed


@pytest.mark.parametrize("mode", ["fails", "ends first"])
def test_a_training_ends_without_the_next_generation(
    mode, hosts, undisturbed, tmp_path
):
    after = f"{ONE},{TWO}"
    printed = start(hosts, tmp_path, ONE, OVERLAPPING, mode, str(tmp_path), after)
    results = json.loads((tmp_path / "result.json").read_text())
    np.testing.assert_allclose(results["losses"], undisturbed, rtol=1e-12)
    assert results["size"] == 1
    assert [run.replicas for run in check(tmp_path / "ledger").runs] == [1]
    failures = FAILURES if mode == "fails" else 0
    assert printed.count("has failed while it was prepared") >= failures - 1, printed
    assert printed.count("on lab2 ended with exit code 3") >= failures, printed
    assert hosts.processes() == []


def test_an_elastic_function_goes_on_in_the_next_round(hosts, tmp_path):
    program = "tests/hosts/ranks_elastic.py"
    words = [program, "renew", str(tmp_path), f"{ONE},{TWO},{THREE}"]
    printed = start(hosts, tmp_path, f"{ONE},{TWO}", *words)
    for rank in range(3):
        assert f"36.0 {[2, 2, 2, 3, 3, 3, 3, 3]} {rank}" in printed, printed
