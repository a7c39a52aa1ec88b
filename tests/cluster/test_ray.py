"""A Ray of two nodes: make test-ray installs it into an environment of its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.cluster.nodes import NETWORK, ROOT, Nodes, environment

PYTHON = ROOT / "build" / "clusters" / "bin" / "python"
ADDRESS = f"{NETWORK}.1:6379"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no Ray: make test-ray")


@pytest.fixture
def ray(cluster: Nodes) -> Iterator[Nodes]:
    """The first two nodes have two workers each."""
    common = ["--num-cpus=2", "--num-gpus=0", "--object-store-memory=80000000"]
    common += ["--disable-usage-stats", "--block"]
    first = ["--head", "--port=6379", "--include-dashboard=false"]
    daemons = []
    for node, words in ((1, first), (2, [f"--address={ADDRESS}"])):
        start = [str(PYTHON), "-m", "ray.scripts.scripts", "start", *words, *common]
        command = cluster.on(node, [*start, f"--node-ip-address={NETWORK}.{node}"])
        with (cluster.folder / f"ray{node}").open("wb") as file:
            daemon = subprocess.Popen(
                command,
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        daemons.append(daemon)
        log = cluster.folder / f"ray{node}"
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline and daemon.poll() is None, (
                log.read_text()
            )
            time.sleep(0.3)
    yield cluster
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        daemon.wait(60)


def reports(ray: Nodes, *arguments: str) -> dict[str, str]:
    """What the program prints, by the first word of each line."""
    words = [str(PYTHON), "-m", "tests.cluster.ray_program", ADDRESS, *arguments]
    done = ray.run(1, words, 400)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def assert_nothing_left(ray: Nodes) -> None:
    """No rank, agent or mpirun runs on a node of Ray."""
    deadline = time.monotonic() + 15
    while left := [
        line
        for node in (1, 2)
        for line in ray.on_node(node).values()
        if "run_function" in line or "prte" in line
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.3)


def test_a_function_on_every_rank(ray):
    found = reports(ray)
    places = [(1111.0, r, "node1" if r < 2 else "node2") for r in range(4)]
    places_reversed = [(s, r, "node2" if r < 2 else "node1") for s, r, _ in places]
    assert found["sums"] in (str(places), str(places_reversed))
    assert found["fails"].startswith(
        "CollectiveError collective.ray.run: rank 1 failed"
    )
    assert "ValueError: of rank 1" in found["fails"]
    assert "an actor or its node was lost" in found["killed"]
    assert "Ray has not 9 times {'CPU': 1} free within 3 s" in found["none"]
    assert found["again"].startswith("[(11.0, 0, ")
    assert_nothing_left(ray)


def test_executor(ray):
    found = reports(ray, "executor")
    assert found["early"].startswith("UsageError RayExecutor: not started")
    assert found["counters"] == str([(r, 100 + 30 * (r + 1)) for r in range(4)])
    assert found["single"] == "130"
    assert found["variable"] == str(["there"] * 4)
    assert found["remote"] == str([1111.0, 15.0])
    assert found["raises"].startswith("CollectiveError RayExecutor: rank 1 failed")
    assert "ValueError: of rank 1" in found["raises"]
    assert "the rank has ended" in found["ended"]
    assert found["hosts"] == str(["node1", "node2"])
    assert "an actor or its node was lost" in found["lost"]
    assert_nothing_left(ray)
