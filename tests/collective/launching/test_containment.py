"""Processes of a rank end with it, even a daemon that left its process group."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from collective.launch import containment
from tests import launch

pytestmark = launch.NOT_ON_RANKS
SECONDS = 120.0  # because the machine may be busy
# Each daemon leaves its group and parent; the last has an empty mark.
DAEMONS = r"""
setsid sh -c 'echo daemon $$; exec sleep 1000' &
setsid sh -c 'setsid sh -c "echo daemon \$\$; exec sleep 1000" & exit' &
COLLECTIVE_CONTAINED= setsid sh -c 'echo stays $$; exec sleep 1000 >/dev/null 2>&1' &
may_end() { while [ ! -e "$1" ]; do sleep 0.05; done; }
"""


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_few(pids: list[int], most: int = 0) -> None:
    """Wait until at most so many of them run."""
    launch.await_that(lambda: sum(map(runs, pids)) <= most, SECONDS)


def start(
    words: list[str], script: str, go_on: Path
) -> tuple[subprocess.Popen, list[int], list[int]]:
    """Start a job of two ranks; return it, its daemons, and those that must stay.

    ``$1`` of its script is a file that appears when all daemons have reported their ids: a
    rank that ends earlier would end them with it.
    """
    job = subprocess.Popen(
        [*launch.command("native", 2), *words, "sh", "-c", script, "sh", str(go_on)],
        cwd=launch.ROOT,
        env=launch.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    found: dict[str, list[int]] = {"daemon": [], "stays": []}
    assert job.stdout is not None
    for _ in range(6):
        _, kind, pid = job.stdout.readline().split()
        found[kind].append(int(pid))
    go_on.touch()
    return job, found["daemon"], found["stays"]


@pytest.mark.launches
@pytest.mark.parametrize(
    "how", ["ends", pytest.param("fails", marks=pytest.mark.matrix), "is killed"]
)
def test_daemons_end_with_the_job(how, tmp_path):
    end = {"ends": 'may_end "$1"', "fails": 'may_end "$1"; exit 3'}
    script = DAEMONS + end.get(how, "sleep 1000")
    job, daemons, stay = start([], script, tmp_path / "go on")
    try:
        assert len(daemons) == 4 and len(stay) == 2
        if how == "is killed":
            job.kill()
        assert job.wait(SECONDS) == {"ends": 0, "fails": 3}.get(how, -signal.SIGKILL)
        await_few(daemons)
        assert all(map(runs, stay))
    finally:
        for pid in (*daemons, *stay):
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        job.stdout.close()


@pytest.mark.launches
def test_daemons_of_an_elastic_rank_end_with_it(tmp_path):
    end = '[ "$COLLECTIVE_RANK" = 0 ] && sleep 1000; may_end "$1"; kill -9 $$'
    job, daemons, stay = start(["--min-np", "1"], DAEMONS + end, tmp_path / "go on")
    try:
        await_few(daemons, 2)
        assert sum(map(runs, daemons)) == 2 and job.poll() is None
        job.terminate()
        job.wait(SECONDS)
        await_few(daemons)
    finally:
        for pid in (*daemons, *stay):
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        job.stdout.close()


def test_marks_of_one_job_begin_alike_and_differ():
    marks, others = containment.Marks(), containment.Marks()
    first, second = marks.make(), marks.make()
    assert first.startswith(marks.job) and second.startswith(marks.job)
    assert not second.startswith(first) and others.job != marks.job


def test_only_what_has_the_mark_is_found():
    marks = containment.Marks()
    made = [marks.make() for _ in range(11)]  # ".1." is not a prefix of ".11."
    sleepers = [
        subprocess.Popen(["sleep", "100"], env={containment.VARIABLE: made[i]})
        for i in (0, 10)
    ]
    try:
        first, last = (each.pid for each in sleepers)
        # The kernel shows the environment a moment after the program has begun.
        launch.await_that(lambda: containment.find(marks.job) == {first, last})
        assert containment.find(made[0]) == {first}
        assert containment.find(marks.job) == {first, last}
        containment.kill(made[0])
        assert sleepers[0].wait(SECONDS) == -signal.SIGKILL
        assert containment.find(marks.job) == {last}
    finally:
        for each in sleepers:
            each.kill()
            each.wait()
