"""Processes that should end and do not, and time in which nothing ran."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest

from collective import running_time
from collective.elastic import membership_file
from collective.environment import Environment
from collective.environment.base import MIN_NP, RANK_TIMEOUT
from collective.launch import endings, processes, rank, supervisor
from collective.launch.endings import Lingering, Undead
from collective.launch.job import run
from collective.launch.options import LaunchOptions
from collective.launch.single_host import EndTogether
from collective.launch.supervisor import ProcessSpec
from collective.running_time import Deadline, Lasting, Stops
from tests import freezer, launch


class Clock:
    """Replaces ``time``."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (running_time, endings):
        monkeypatch.setattr(module, "time", made)
    return made


def test_a_suspended_process_does_not_count_the_time(clock):
    lasting, stops = Lasting(4), Stops()
    assert not lasting.since(True)
    for pause, over in ((1, False), (1, False), (3600, False), (1, False), (1.5, True)):
        clock.now += pause
        stops.look()
        assert lasting.since(True) is over
    assert stops.since(0) == 3600
    assert stops.since(clock.now - 3) == 0.5
    assert not lasting.since(False)


def test_a_deadline_does_not_count_a_suspension(clock):
    deadline = Deadline(10)
    for pause, left in ((1, 9), (3600, 7), (2, 5), (1e9, 3), (1, 2)):
        clock.now += pause
        assert deadline.left() == left and not deadline.passed()
    assert deadline.pause() == 0.5  # it is polled often enough
    for _ in range(2):
        clock.now += 1
    assert not Deadline(10).passed() and Deadline(0).passed()
    clock.now += 2
    assert deadline.passed() and deadline.pause() == 0.01
    slow = Deadline(60, longest=30)  # for tries that may each take so long
    clock.now += 25
    assert slow.left() == 35


def test_a_command_may_be_suspended_for_longer_than_its_time(clock, monkeypatch):
    def suspended() -> float:
        clock.now += 3600
        return clock.now

    monkeypatch.setattr(clock, "monotonic", suspended)
    assert processes.run(["sh", "-c", "sleep 0.3; cat"], 60, "text").out == "text"


def test_a_command_may_leave_a_daemon_behind():
    """ssh does so with ControlPersist: the daemon holds the output of its program."""
    daemon = "setsid sleep 30 & echo to stdout; echo to stderr >&2; exit 3"
    found = processes.run(["sh", "-c", daemon], 25)
    assert found == processes.Result(3, "to stdout\n", "to stderr")
    hangs = processes.run(["sh", "-c", "setsid sleep 30 & sleep 30"], 0.5)
    assert found != hangs == processes.Result(None, error="no answer in 0.5 s")


def test_the_watchdog_holds_no_other_file_open():
    """Another thread may be starting a process, and may wait until its pipe is closed."""
    reading, writing = os.pipe()
    watchdog = processes.Watchdog()
    try:
        os.close(writing)
        assert select.select([reading], [], [], 10)[0]
    finally:
        os.close(reading)
        watchdog.close()


def test_a_rank_that_has_finished_and_does_not_end_is_named(clock, capsys):
    membership = membership_file.MembershipFile(2)
    os.pwrite(
        membership._file, membership_file.EXITING, len(membership_file.HEADER) + 1
    )
    lingering = Lingering(membership, 1.5)
    ranks = [(0, os.getpid()), (1, 1)]
    for over in ([], [], [1]):
        assert lingering.look(ranks, "rank {}".format) == over
        clock.now += 1
    assert "rank 1 (process 1) has finished its work" in capsys.readouterr().err


def test_each_rank_under_mpirun_that_has_finished_and_does_not_end_is_killed(
    clock, monkeypatch, capsys
):
    """This is not only for rank 0: each supervisor has a file for its own rank."""
    monkeypatch.setenv("COLLECTIVE_TIMEOUT", "1.5")
    monkeypatch.delenv("COLLECTIVE_RANK", raising=False)
    watch = rank.RankWatch(LaunchOptions(["true"]), Environment("mpirun", 1, 2, 1, 2))
    monkeypatch.setattr(endings.membership_file, "_open", membership_file.open_memory)
    monkeypatch.setenv(membership_file.VARIABLE, watch.membership.path)
    membership_file.write_state(membership_file.EXITING)  # the rank does this
    killed = []
    job = watch.supervisor
    monkeypatch.setattr(job, "signal_all", lambda *which: killed.append(which))
    job.processes[os.getpid()] = (1, None)
    monkeypatch.setattr(endings.Undead, "look", lambda *_: [])
    monkeypatch.setattr(os, "waitpid", lambda *_: (0, 0))
    for over in ([], [], [(signal.SIGKILL, 1)]):
        job.look()
        assert killed == over
        clock.now += 1
    assert "has finished its work" in capsys.readouterr().err


def test_a_rank_under_mpirun_reports_that_it_waits_and_ends_with_its_parent(
    clock, monkeypatch, capsys
):
    monkeypatch.setenv(RANK_TIMEOUT, "10")
    monkeypatch.setenv(MIN_NP, "1")
    options = LaunchOptions(["true"], min_np=1)
    watch = rank.RankWatch(options, Environment("mpirun", 1, 2, 1, 2))
    waits = iter((3.0, 11.0, 12.0, 22.0, 1.0, 12.0))
    monkeypatch.setattr(watch.wait_report, "waits", lambda: next(waits))
    reported = []
    monkeypatch.setattr(watch, "report_state", reported.append)
    for count in (0, 1, 1, 2, 2, 3):
        clock.now += 0.3
        watch.look()  # it does not poll in between
        clock.now += 0.3
        watch.look()
        assert reported == ["waits"] * count
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(watch, "_look_whether_it_waits", lambda now: None)
    assert not watch.supervisor.ending
    clock.now += 0.6
    watch.look()
    assert watch.supervisor.ending


def test_states_of_processes():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        assert not processes.kill_is_pending(child.pid)
        assert f" (process {child.pid})" in processes.describe_children(os.getpid())
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert processes.describe_state(child.pid) == "state T, stopped"
        before = processes.activity(child.pid)
        assert before and processes.activity(child.pid) == before
    finally:
        child.kill()
        child.wait()
    assert processes.activity(child.pid) == 0
    assert processes.describe_state(child.pid) == "state unknown"


@pytest.mark.launches
@pytest.mark.skipif(freezer.why_not() != "", reason=freezer.why_not())
def test_a_process_that_cannot_die_is_left_behind_and_named(monkeypatch, capsys):
    monkeypatch.setattr(endings, "DEAD_SECONDS", 0.5)
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.5)
    watched = []

    class Job(EndTogether):
        def look(self):
            if not watched:
                [(pid, _)] = self.supervisor.processes.items()
                watched.append(pid)
                freeze.enter_context(freezer.frozen([pid]))
                self.supervisor.end(signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in processes.ending_signals()}
    try:
        with contextlib.ExitStack() as freeze:
            options = LaunchOptions(no_prefix=True)
            specs = [ProcessSpec(0, ["sleep", "100"])]
            run(Job(specs, options, membership_file.MembershipFile(1)))
            assert processes.kill_is_pending(watched[0])
            printed = capsys.readouterr().err
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "it counts as dead" in printed
    assert f"left behind: rank 0, process {watched[0]} (state " in printed
    with contextlib.suppress(ChildProcessError):
        os.waitpid(watched[0], 0)


BLOCKED = """
import os, signal, sys
if os.environ["COLLECTIVE_RANK"] == "1":
    print("x" * 1000000, file=sys.stderr)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.launches
def test_nobody_reads_and_the_job_ends():
    """In spite of a full pipe the launcher ends the ranks, and itself."""
    reading, writing = os.pipe()
    command = [*launch.command("native", 2), sys.executable, "-c", BLOCKED]
    job = subprocess.Popen(
        command, stdout=writing, stderr=writing, env=launch.environment()
    )
    os.close(writing)
    try:
        assert job.wait(launch.PATIENCE_SECONDS) == 128 + signal.SIGKILL
    finally:
        job.kill()
        os.close(reading)


def test_undead_ones_are_found_by_whoever_has_killed_them(clock):
    undead = Undead()
    for over in (*[[]] * 6, [1]):
        assert undead.look([1, 2], {1}) == over
        clock.now += 1
