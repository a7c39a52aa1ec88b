"""Jobs that restart on other hosts, with mpirun, on this host, without TensorFlow."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from collective.elastic import generations
from collective.environment import gpus
from collective.errors import CollectiveError, UsageError
from collective.hosts import Host
from collective.launch import mpi, restarting
from collective.launch.discovery import FixedHosts
from collective.launch.job import run
from collective.launch.mpirun import Mpirun
from collective.launch.options import LaunchOptions
from collective.launch.overlap import Overlap
from tests import launch

HERE = [Host("localhost", 2)]
PROGRAM = """
import os, sys, time
from pathlib import Path
import numpy as np
import collective
from collective.elastic import generations

slots, give_up = Path(sys.argv[1]), time.monotonic() + 30
collective.init()
score = Path("/proc/self/oom_score_adj")
scores = [score.read_text()]
generations.wait_for_previous()
scores.append(score.read_text())
if generations.number() == 0:
    slots.with_suffix(".part").write_text("localhost:2")
    slots.with_suffix(".part").rename(slots)
    while not generations.restart_requested() and time.monotonic() < give_up:
        time.sleep(0.01)
    (generations.make_state_folder() / "kept").write_text("state")
    slots.with_suffix(".score").write_text(scores[0])
    sys.exit(generations.EXIT_CODE)
if os.environ["OVERLAPS"] == "yes":  # in want of memory, the kernel kills it first
    assert scores == ["1000\\n", slots.with_suffix(".score").read_text()], scores
kept = collective.allgather(np.array([generations.kept_state() is not None]))
collective.barrier()
if collective.rank() == 0:
    print(generations.number(), collective.size(), (generations.kept_state() / "kept").read_text())
    generations.remove_state()
collective.barrier()
"""


@pytest.mark.launches
@launch.NEEDS_CORE
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
@pytest.mark.parametrize("overlaps", ["yes", "no"])
def test_a_job_restarts(overlaps, tmp_path):
    slots = tmp_path / "slots"
    slots.write_text("localhost:1\nelsewhere.invalid:8")
    command = [sys.executable, "-m", "collective.launch", "--mpi"]
    command += ["--min-np", "1", "--max-np", "3"]
    command += ["--host-discovery-script", f"cat {slots}"]
    if overlaps == "no":
        command += ["--no-overlap"]
    env = launch.environment(TMPDIR=str(tmp_path), OVERLAPS=overlaps)
    code, printed = launch.run(
        [*command, sys.executable, "-c", PROGRAM, str(slots)], env, 60
    )
    assert code == 0 and "[0] 1 2 state\n" in printed, printed
    prepared = "generation 1 is prepared, on localhost:2; the job trains meanwhile\n"
    assert (prepared in printed) == (overlaps == "yes"), printed
    assert printed.count("elsewhere.invalid is left out: cannot reach") == 1
    assert "generation 1: 2 ranks, on localhost:2\n" in printed
    assert not list(tmp_path.glob("collective-*"))


@pytest.fixture
def job(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(generations.JOB_VARIABLE, "name")
    monkeypatch.setenv(generations.NUMBER_VARIABLE, "1")


def test_only_what_the_user_has_kept_is_found(job, tmp_path):
    assert generations.kept_state() is None
    folder = generations.make_state_folder()
    assert generations.kept_state() == folder and folder.stat().st_mode & 0o777 == 0o700
    shutil.move(folder, tmp_path / "elsewhere")
    Path(folder).symlink_to(tmp_path / "elsewhere")
    assert generations.kept_state() is None
    folder.unlink()
    generations.make_state_folder()
    generations.remove_state()
    assert not folder.exists()


def test_nothing_is_kept_where_somebody_was_before(job, tmp_path):
    generations.state_folder("name").symlink_to(tmp_path)
    with pytest.raises(FileExistsError):
        generations.make_state_folder()


@pytest.fixture
def launcher(monkeypatch):
    """Return the launcher of a job that trains with two ranks here."""
    monkeypatch.setattr(restarting, "_why_only_local", lambda options: "")
    found = mpi.MPI("Open MPI", (5, 0), "mpirun")
    monkeypatch.setattr(mpi, "find", lambda program=None: found)
    options = LaunchOptions(
        ["train.py"], min_np=1, max_np=8, reset_limit=3, use_mpi=True
    )
    made = restarting.RestartingLauncher(options, FixedHosts(HERE), HERE)
    made.placed, made.number = HERE, 0
    made.job = Mpirun(options, HERE)
    return made


def hears(job, line):
    """Give the job a message of a rank's supervisor, with the word of the job."""
    line = line.replace(" on a", f" on a{job.relay._word}", 1)
    job.relay._is_shown(f"collective.launch: {line}\n")


def test_ranks_that_are_to_leave_a_host_do_not_wait(launcher):
    assert launcher._overlaps([Host("localhost", 3)])
    assert launcher._overlaps([*HERE, Host("other", 1)])
    assert not launcher._overlaps([Host("localhost", 1), Host("other", 4)])
    hears(launcher.job, "rank 1 on a ended by SIGKILL")
    assert launcher._overlaps([Host("localhost", 1), Host("other", 4)])
    launcher.number = 3
    assert not launcher._overlaps(HERE)  # --reset-limit does not allow more


@launch.NEEDS_CORE
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_two_generations_do_not_share_gpus(launcher, monkeypatch, capfd):
    monkeypatch.setattr(gpus, "granted", lambda: [])
    overlap = Overlap()
    assert launcher._prepare(overlap, HERE) and overlap.job is not None
    monkeypatch.setattr(gpus, "granted", lambda: ["0"])
    overlap = Overlap()
    assert not launcher._prepare(overlap, HERE) and overlap.job is None
    assert "this host: the memory of GPUs does not suffice" in capfd.readouterr().err
    assert not launcher._overlaps(HERE)


def test_a_rank_that_hangs_does_not_release_ranks_that_are_ready(launcher):
    """The signal that tests whether ranks hang would release them."""
    job = Mpirun(launcher.options, HERE, {generations.OVERLAPS: "1"})
    job.relay.started.update({0: "a", 1: "a"})
    job.relay.ready.add(0)
    job._end_hanging()
    assert job.supervisor.ending and not job.asked


def test_a_host_that_was_gone_and_comes_back_is_asked_at_once(monkeypatch):
    monkeypatch.setattr(restarting, "_why_only_local", lambda options: "")
    present = [Host("localhost", 1), Host("other.invalid", 1)]
    options = LaunchOptions(min_np=1, max_np=2)
    launcher = restarting.RestartingLauncher(options, FixedHosts(present))
    reasons = ["does not answer", ""]
    monkeypatch.setattr(launcher, "_why_unreachable", lambda host: reasons.pop(0))
    other = present[1]
    assert other not in launcher._wanted() and other not in launcher._wanted()
    del present[1]
    assert other not in launcher._wanted()
    present.append(other)
    assert other in launcher._wanted() and not reasons


def test_slots_that_do_not_come_end_the_wait(monkeypatch, capfd):
    monkeypatch.setattr(restarting, "_why_only_local", lambda options: "")
    options = LaunchOptions(min_np=4, max_np=4, elastic_timeout=1)
    launcher = restarting.RestartingLauncher(options, FixedHosts(HERE))
    with pytest.raises(UsageError, match="no slots for 4 ranks within 1 s"):
        run(launcher)
    assert capfd.readouterr().err.count("2 slots; waiting for 4\n") == 1


def test_a_restart_whose_hosts_fail_their_check_is_tried_again(
    launcher, monkeypatch, capfd
):
    """This includes a job that does not grow, which restarts after the loss of a host."""
    monkeypatch.setattr(restarting.processes, "ending_signals", list)
    monkeypatch.setattr(restarting, "POLL_SECONDS", 0.01)
    options = LaunchOptions(["train.py"], min_np=1, use_mpi=True)
    launcher = restarting.RestartingLauncher(options, FixedHosts(HERE), HERE)

    def generation(number):
        launcher.job = Mpirun(options, HERE)
        launcher.job.lost_host = number == 0
        if number == 1:
            raise CollectiveError("a host does not answer", hint="wait")
        return 3 if number == 2 else 0

    monkeypatch.setattr(launcher, "_generation", generation)
    assert run(launcher) == 3
    assert capfd.readouterr().err.count("restarting the job on the remaining") == 2


def test_a_job_under_nohup_outlives_its_terminal_between_generations(
    launcher, monkeypatch
):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    codes = [generations.EXIT_CODE, 0]
    monkeypatch.setattr(launcher, "_generation", lambda number: codes.pop(0))
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert run(launcher) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == restarting._exit
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_mpirun_that_has_lost_a_host_and_stays_is_ended(launcher):
    job = Mpirun(launcher.options, HERE)
    job.loses_host.seconds = 0.0
    job.look()
    assert not job.supervisor.ending
    job.relay._is_shown("  Remote daemon: [prterun-node1-7@0,1] on node other")
    job.look()
    time.sleep(0.01)
    job.look()
    assert job.supervisor.ending
    job.report()
    assert job.lost_host and job.supervisor.exit_code == 1


def test_a_rank_that_fails_ends_an_mpirun_that_stays(launcher):
    """This includes an elastic job whose rank had not joined yet; once for each failure."""
    job = Mpirun(launcher.options, HERE)
    job.stays.seconds = 0.0
    ended = []
    job.supervisor.end = ended.append
    for line in ("rank 0 on a ended by SIGKILL", ""):
        hears(job, line)
        job.look()
        time.sleep(0.01)
        job.look()
        assert not ended
    early = "rank 1 on a ended by SIGKILL, before it had joined the job"
    hears(job, early)
    for _ in range(3):
        job.look()
        time.sleep(0.01)
    assert ended == [signal.SIGTERM]


def test_a_host_whose_supervisors_answer_is_not_given_up(launcher):
    """A rank that reports that it waits has answered, too: its supervisor runs."""
    job = Mpirun(launcher.options, [Host("localhost", 3)])
    for line in ("0 on a started", "1 on a started", "2 on a started", "2 on a waits"):
        hears(job, f"rank {line}")
    job.look()
    assert set(job.asked) == {0, 1}
    hears(job, "rank 0 on a answers")
    job.look()
    assert set(job.asked) == {1}
    hears(job, "rank 1 on a waits")
    job.look()
    assert set(job.asked) == {0, 2}
    hears(job, "rank 2 on a answers")
    job.look()
    assert set(job.asked) == {0} and not job.supervisor.ending
    job.asked[0] -= 1000.0
    job.look()
    assert job.silent == [0] and job.lost_host and job.supervisor.ending


def test_a_job_whose_mpi_does_not_report_a_death_is_restarted(
    launcher, monkeypatch, capfd
):
    """It is restarted only if all remaining ranks wait, long after the death."""
    job = Mpirun(launcher.options, [Host("localhost", 3)])
    for rank in range(3):
        hears(job, f"rank {rank} on a started")

    def both_wait():
        for rank in (0, 2):
            hears(job, f"rank {rank} on a waits")
            job.look()

    both_wait()
    hears(job, "rank 1 on a ended by SIGKILL")
    both_wait()  # too early to tell
    assert not job.supervisor.ending
    monkeypatch.setattr("collective.launch.mpirun._REPORT_SECONDS", 0.0)
    for _ in range(2):
        hears(job, "rank 2 on a waits")  # it waits for rank 0, which is at work
        job.look()
        assert not job.supervisor.ending
    both_wait()
    assert job.supervisor.ending
    job.report()
    assert job.lost_host and job.supervisor.exit_code == 1
    assert "rank 1 of 3 has ended, and MPI has not" in capfd.readouterr().err


def test_a_job_that_has_ended_since_a_rank_waited_is_not_restarted(
    launcher, monkeypatch
):
    monkeypatch.setattr("collective.launch.mpirun._REPORT_SECONDS", 0.0)
    job = Mpirun(launcher.options, HERE)
    for line in ("0 on a started", "1 on a started", "1 on a ended by SIGKILL"):
        hears(job, f"rank {line}")
    job.look()
    hears(job, "rank 0 on a waits")
    hears(job, "rank 0 on a ended with exit code 0")
    job.look()
    assert not job.lost_host and not job.supervisor.ending


FORGOTTEN = """
import os, signal, time
from collective.elastic import generations, membership_file, wait_report
membership_file.write_state(membership_file.JOINED)
if generations.number() == 0:
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    with wait_report.reported_wait():
        while True:  # as MPI waits
            time.sleep(0.01)
print("done")
"""


@pytest.mark.launches
@launch.NEEDS_CORE
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_ranks_that_wait_for_a_dead_one_are_started_again(tmp_path):
    """MPI does not report the death, because the ranks do not use MPI here."""
    command = [sys.executable, "-m", "collective.launch", "--mpi", "-np", "3"]
    command += ["--min-np", "2", "--rank-timeout", "2"]
    env = launch.environment(TMPDIR=str(tmp_path))
    code, printed = launch.run([*command, sys.executable, "-c", FORGOTTEN], env, 120)
    assert code == 0 and printed.count("] done\n") == 3, printed
    assert "rank 1 of 3 has ended, and MPI has not reported it" in printed, printed
    assert "generation 1: 3 ranks, on localhost:3\n" in printed, printed


def test_a_generation_that_is_not_needed_any_more_ends_silently(launcher, capfd):
    job = Mpirun(launcher.options, HERE)
    job.cancel()
    job.report()
    assert job.interrupted and not capfd.readouterr().err
    job.supervisor._forward(signal.SIGTERM, None)
    job.report()
    assert "interrupted" in capfd.readouterr().err


def test_ranks_that_have_handed_over_and_do_not_end_are_ended():
    """The state of the next generation is checked after their end."""
    ended = []
    before = SimpleNamespace(
        ending=False, processes=[1], give_up=lambda: ended.append(1)
    )
    present = SimpleNamespace(supervisor=before)
    supervisor = SimpleNamespace(processes=[2], look=lambda: None)
    job = SimpleNamespace(released=True, supervisor=supervisor, start=lambda **_: None)
    overlap = Overlap()
    overlap.prepare(job, HERE, 60)
    overlap.look(present)
    assert not ended
    supervisor.processes = []
    overlap.look(present)
    assert ended
    ended.clear()
    supervisor.processes, overlap._handed_over.seconds = [2], 0.0
    time.sleep(0.01)
    overlap.look(present)
    assert ended
