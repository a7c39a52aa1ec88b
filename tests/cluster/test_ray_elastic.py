"""Jobs of Ray that survive the loss of a rank, an actor, a node, and of the head."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.nodes import Nodes
from tests.cluster.ray_nodes import ADDRESS, PYTHON, assert_nothing_left, running
from tests.cluster.training import Training

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no Ray: make test-ray")


RANK = "bin/python -m collective.run_function"


def training(cluster: Nodes, name: str, least: int, start: int, most: int) -> Training:
    words = [str(PYTHON), "-m", "tests.cluster.ray_elastic_program", ADDRESS]
    folder = cluster.folder / name
    folder.mkdir()
    return Training(
        cluster, folder, [*words, str(folder), *map(str, (least, start, most))]
    )


@pytest.fixture
def ray(cluster: Nodes) -> Iterator[Nodes]:
    with running(cluster, 1):
        yield cluster


def test_a_lost_rank_is_replaced_in_place(ray):
    job = training(ray, "rank", least=1, start=2, most=2)
    at = job.until(2)
    job.kill(1, RANK, since=-1)
    job.until(2, job.until(1, at))
    job.assert_losses(2)
    assert_nothing_left(ray, 1)


def test_lost_actors_are_replaced_where_ray_has_room(ray):
    with running(ray, 2) as second:
        job = training(ray, "actors", least=1, start=4, most=4)
        at = job.until(4)
        job.kill(2, "ray::Worker")  # the agent, too
        at = job.until(4, job.until(2, at))
        second.kill()
        job.kill(2, "")
        at = job.until(2, at)
    with running(ray, 3):
        job.until(4, at)
        job.assert_losses(4)
        assert_nothing_left(ray, 1, 3)  # node 2 was killed as a whole


def test_a_job_whose_head_is_lost_resumes(ray):
    job = training(ray, "head", least=1, start=2, most=2)
    at = job.until(2)
    job.kill(1, "ray::Worker")
    job.until(2, at)
    job.assert_losses(2)
    assert "the actor that leads the job was lost" in job.text()
    assert_nothing_left(ray, 1)


def test_executor(ray):
    words = [str(PYTHON), "-m", "tests.cluster.ray_elastic_program", ADDRESS]
    done = ray.run(1, [*words, str(ray.folder)], 400)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert found["early"].startswith("UsageError RayExecutor: not started")
    assert found["sums"] == str([(11.0, 0), (11.0, 1)])
    assert found["execute"] == str([(0, 110), (1, 120)])
    assert found["variable"] == str(["there"] * 2)
    for name in ("remote", "single"):
        assert found[name].startswith("UsageError RayExecutor: no ")
    assert found["lost"] in (str([1]), str([11, 11])), found["lost"]
    assert found["hosts"].startswith("UsageError RayExecutor: with min_workers Ray")
    assert found["order"].startswith("UsageError min_workers=2, num_workers=2, max")
    assert found["again"] == str([(11.0, 0), (11.0, 1)])
    assert_nothing_left(ray, 1)
