"""What a rank has started ends with it, also a daemon that left its process group."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from collective.launch import cgroups, containment, processes
from tests import launch

pytestmark = launch.NOT_ON_RANKS
SECONDS = 30.0
# Each leaves group and parent; the last has an empty mark.
DAEMONS = r"""
setsid sh -c 'echo daemon $$; exec sleep 1000' &
setsid sh -c 'setsid sh -c "echo daemon \$\$; exec sleep 1000" & exit' &
COLLECTIVE_CONTAINED= setsid sh -c 'echo stays $$; exec sleep 1000 >/dev/null 2>&1' &
wait_for_it() { sleep 1000; }
"""


# These have no mark at all, but for the last, whose is empty.
EMPTIED = r"""
env -i "PATH=$PATH" setsid sh -c '
    setsid sh -c "echo daemon \$\$; exec sleep 1000" & echo daemon $$; exec sleep 1000' &
COLLECTIVE_CONTAINED= setsid sh -c 'echo stays $$; exec sleep 1000 >/dev/null 2>&1' &
wait_for_it() { sleep 1000; }
"""


def why_no_cgroup() -> str:
    """Why no cgroup can be made here; empty where one can."""
    if group := cgroups.make("to-see-whether-one-can-be-made"):
        cgroups.remove([group], 0)
        return ""
    return "no cgroup of version 2 can be made here"


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def still_run(pids: list[int]) -> list[int]:
    """Those that have not ended after a while."""
    deadline = time.monotonic() + SECONDS
    while (left := list(filter(runs, pids))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def start(
    words: list[str], script: str
) -> tuple[subprocess.Popen, list[int], list[int]]:
    """A job of two ranks; its daemons, and those that are to stay."""
    job = subprocess.Popen(
        [*launch.command("native", 2), *words, "sh", "-c", script],
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
    return job, found["daemon"], found["stays"]


@pytest.mark.launches
@pytest.mark.parametrize(
    "how", ["ends", pytest.param("fails", marks=pytest.mark.matrix), "is killed"]
)
@pytest.mark.parametrize("daemons_of", [DAEMONS, EMPTIED], ids=["marked", "emptied"])
def test_daemons_end_with_the_job(how, daemons_of):
    if daemons_of is EMPTIED and (why_not := why_no_cgroup()):
        pytest.skip(why_not)
    end = {"ends": "sleep 1", "fails": "sleep 1; exit 3"}.get(how, "wait_for_it")
    job, daemons, stay = start([], daemons_of + end)
    try:
        assert len(daemons) == 4 and len(stay) == 2
        if how == "is killed":
            job.kill()
        assert job.wait(SECONDS) == {"ends": 0, "fails": 3}.get(how, -signal.SIGKILL)
        assert still_run(daemons) == []
        assert all(map(runs, stay))
    finally:
        for pid in (*daemons, *stay):
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        job.stdout.close()


@pytest.mark.launches
def test_daemons_of_an_elastic_rank_end_with_it():
    end = '[ "$COLLECTIVE_RANK" = 0 ] && wait_for_it; sleep 1; kill -9 $$'
    job, daemons, stay = start(["--min-np", "1"], DAEMONS + end)
    try:
        deadline = time.monotonic() + SECONDS
        while sum(map(runs, daemons)) > 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sum(map(runs, daemons)) == 2 and job.poll() is None
        job.terminate()
        job.wait(SECONDS)
        assert still_run(daemons) == []
    finally:
        for pid in (*daemons, *stay):
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        job.stdout.close()


def test_a_cgroup_goes_with_all_that_is_in_it_but_what_is_to_stay():
    if why_not := why_no_cgroup():
        pytest.skip(why_not)
    group = cgroups.make("of-a-test")
    assert group is not None and cgroups.find("of-a-t") == [group]
    (group / "made-by-the-rank").mkdir()
    sleepers = [processes.start(["sleep", "100"], cgroup=group) for _ in range(2)]
    sleepers.append(processes.start(["sleep", "100"], cgroup=group, has_threads=True))
    try:
        first, *others = sleepers
        deadline = time.monotonic() + SECONDS
        while len((group / "cgroup.procs").read_text().split()) < 3:
            assert time.monotonic() < deadline
        cgroups.kill(group, keep=lambda pid: pid == first.pid)
        cgroups.remove([group], SECONDS)
        assert [each.wait(10) for each in others] == [-signal.SIGKILL] * 2
        assert first.poll() is None and not group.exists()
    finally:
        for each in sleepers:
            each.kill()
            each.wait()


def test_marks_of_one_job_begin_alike_and_differ():
    marks, others = containment.Marks(), containment.Marks()
    first, second = marks.make(), marks.make()
    assert first.startswith(marks.job) and second.startswith(marks.job)
    assert not second.startswith(first) and others.job != marks.job


def test_only_what_has_the_mark_is_found():
    marks = containment.Marks()
    made = [marks.make() for _ in range(11)]  # ".1." is no beginning of ".11."
    sleepers = [
        subprocess.Popen(["sleep", "100"], env={containment.VARIABLE: made[i]})
        for i in (0, 10)
    ]
    try:
        first, last = (each.pid for each in sleepers)
        assert containment.find(made[0]) == {first}
        assert containment.find(marks.job) == {first, last}
        containment.kill(made[0])
        assert sleepers[0].wait(10) == -signal.SIGKILL
        assert containment.find(marks.job) == {last}
    finally:
        for each in sleepers:
            each.kill()
            each.wait()
