"""A Ray of two nodes: make test-ray installs it into an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.nodes import Nodes
from tests.cluster.ray_nodes import ADDRESS, PYTHON, assert_nothing_left, running

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no Ray: make test-ray")


@pytest.fixture
def ray(cluster: Nodes) -> Iterator[Nodes]:
    """Run Ray on the first two nodes, with two workers on each."""
    with running(cluster, 1), running(cluster, 2):
        yield cluster


def reports(ray: Nodes, *arguments: str) -> dict[str, str]:
    """Return the program's output, by the first word of each line."""
    words = [str(PYTHON), "-m", "tests.cluster.ray_program", ADDRESS, *arguments]
    done = ray.run(1, words, 400)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


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
    assert "Ray did not have 9 times {'CPU': 1} free within 3 s" in found["none"]
    assert found["again"].startswith("[(11.0, 0, ")
    assert_nothing_left(ray, 1, 2)


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
    assert_nothing_left(ray, 1, 2)
