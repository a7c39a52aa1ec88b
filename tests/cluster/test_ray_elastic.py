"""Jobs of Ray that outlive the loss of a rank, an actor, a node, and of the head."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import Nodes, environment
from tests.cluster.ray_nodes import ADDRESS, PYTHON, assert_nothing_left, running

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no Ray: make test-ray")


RANK = f"{PYTHON} -m collective.run_function"


class Training:
    """A driver on node 1, whose ranks train until they are stopped."""

    def __init__(self, cluster: Nodes, folder: Path, least: int, start: int, most: int):
        self.cluster, self.folder = cluster, folder
        folder.mkdir()
        words = [str(PYTHON), "-m", "tests.cluster.ray_elastic_program", ADDRESS]
        words += [str(folder), str(least), str(start), str(most)]
        self.output = folder / "output"
        with self.output.open("wb") as file:
            self.driver = subprocess.Popen(
                cluster.on(1, words),
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def sizes(self) -> list[int]:
        """How many ranks each epoch had so far."""
        file = self.folder / "progress"
        lines = file.read_text().splitlines() if file.exists() else []
        return [int(line.split()[3]) for line in lines]

    def until(self, size: int, since: int = 0, seconds: float = 120) -> int:
        """Waits for an epoch of so many ranks; returns how many epochs there are."""
        deadline = time.monotonic() + seconds
        while size not in self.sizes()[since:]:
            text = self.output.read_text(errors="replace")
            assert time.monotonic() < deadline, text
            assert self.driver.poll() is None, text
            time.sleep(0.2)
        return len(self.sizes())

    def kill(self, node: int, words: str, since: int = 0) -> None:
        """Kills processes of a node whose command line begins with these words."""
        mine = self.cluster.on_node(node)
        found = [pid for pid, line in mine.items() if line.startswith(words)]
        assert found, mine
        for pid in found[since:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def assert_losses(self, ranks: int) -> None:
        """Stops it; its losses are those of one process."""
        (self.folder / "stop").touch()
        code = self.driver.wait(120)
        text = self.output.read_text(errors="replace")
        assert code == 0, text
        assert f"\nresults {ranks} " in text, text


@pytest.fixture
def ray(cluster: Nodes) -> Iterator[Nodes]:
    with running(cluster, 1):
        yield cluster


def test_a_lost_rank_is_replaced_in_place(ray):
    job = Training(ray, ray.folder / "rank", least=1, start=2, most=2)
    at = job.until(2)
    job.kill(1, RANK, since=-1)
    job.until(2, job.until(1, at))
    job.assert_losses(2)
    assert_nothing_left(ray, 1)


def test_lost_actors_are_replaced_where_ray_has_room(ray):
    with running(ray, 2) as second:
        job = Training(ray, ray.folder / "actors", least=1, start=4, most=4)
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
    job = Training(ray, ray.folder / "head", least=1, start=2, most=2)
    at = job.until(2)
    job.kill(1, "ray::Worker")
    job.until(2, at)
    job.assert_losses(2)
    assert "the actor that leads the job was lost" in job.output.read_text()
    assert_nothing_left(ray, 1)


def test_executor(ray):
    words = [str(PYTHON), "-m", "tests.cluster.ray_elastic_program", ADDRESS]
    done = ray.run(1, [*words, "executor"], 400)
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
