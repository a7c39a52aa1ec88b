"""The flight recorder: its reports of ranks that wait, differ, stop and die."""

import os
import re
import signal
import stat
import sys

import pytest

from collective.recorder import __main__ as reader
from collective.recorder.dump import Dump, parse_dump, user_line
from collective.recorder.memory import Entry, Rank
from tests import launch
from tests.collective.unlaunched_ranks import PRELUDE, Ranks

pytestmark = launch.STARTS_RANKS

# Rank 1 differs from the others in the requested way.
SCRIPT = r"""
import contextlib, os, signal, sys, time
from pathlib import Path
import numpy as np
import collective
from collective import recorder
from collective.errors import UsageError
from collective.launch import processes
from collective.recorder import memory
from collective.recorder.dump import parse_dump, user_line

collective.init()
rank = collective.rank()
for number in range(600):
    collective.allreduce(np.ones(10, np.float32), name=f"gradient {number}")

def wait_for_the_dump():
    while not (found := dumps()):
        time.sleep(0.1)
    return found[0]

def dumps():
    texts = (f.read_text() for f in Path(os.environ[recorder.VARIABLE]).iterdir())
    with contextlib.suppress(UsageError):  # it is being written
        return [parse_dump(text, "") for text in texts]

def recorded(rank):
    return memory.read_rank(rank, "", time.monotonic_ns())

def line(rank):
    return user_line(recorded(rank).stack)

def waits(rank):
    last = recorded(rank).entries[-1]
    return last.what == "the last" and (last.started or 0) < -1

def misbehave(how):
    # Where ranks stop, the other one comes later.
    while how != "stop" and not (waits(0) and waits(2)):
        time.sleep(0.05)
    while not line(rank).endswith("in misbehave"):  # where it was seen last
        time.sleep(0.05)
    if how == "leave":
        sys.exit(0)
    recorder.in_step(17, time.perf_counter())
    if how == "end":  # as a user does who is tired of waiting, or a batch system
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(1000)
    if how == "stop" and rank == 2:
        os.kill(wait_for_the_dump().ranks[1].pid, signal.SIGCONT)
        sys.exit(3)
    how = {"kill": "SIGKILL", "stop": "SIGSTOP", "terminate": "SIGTERM"}[how]
    os.kill(os.getpid(), getattr(signal, how))

if sys.argv[1] == "differ":
    try:
        collective.allreduce(np.ones(3 + rank, np.float32), name="evil \x1b[31m")
    except collective.Disagreement:
        pass
elif sys.argv[1] == "mpi":  # as a backend that the core does not run
    with recorder.span(recorder.ALL_REDUCE, "by MPI", 40):
        wait_for_the_dump()
    sys.exit(3)
elif rank == 1 or (rank == 2 and sys.argv[1] == "stop"):
    misbehave(sys.argv[1])
elif sys.argv[1] == "stop":  # waits when one rank has stopped, and one is elsewhere
    while not processes.is_stopped(recorded(1).pid):
        time.sleep(0.05)
    while not line(2).endswith("in wait_for_the_dump"):
        time.sleep(0.05)
collective.allreduce(np.ones(5), name="the last")
"""


def incident(tmp_path, how, **variables):
    """Return the exit code, stderr, and the one dump with its file."""
    command = [*launch.command("native", 3), sys.executable, "-c", SCRIPT, how]
    env = launch.environment(COLLECTIVE_RECORDER=str(tmp_path), **variables)
    done = launch.capture(command, env=env)
    files = sorted(
        tmp_path.glob("collective-*.txt"), key=lambda f: f.stat().st_mtime_ns
    )
    assert files, done.stderr
    text = files[0].read_text()
    return done, text, parse_dump(text, files[0].name), files


def test_a_killed_rank_is_reported_by_those_it_leaves(tmp_path):
    done, text, dump, files = incident(tmp_path, "kill")
    assert done.returncode == 128 + signal.SIGKILL
    assert dump.reason.startswith("rank 1 (process") and "died" in dump.reason
    waiting, dead, other = dump.ranks
    assert [r.state for r in dump.ranks] == ["alive", "dead", "alive"]
    # The waiting ranks, their tensor, and their line in Python.
    for rank in (waiting, other):
        last = rank.entries[-1]
        assert (last.kind, last.what, last.bytes) == ("all-reduce", "the last", 40)
        assert last.started < -1 and last.ended is None
        assert user_line(rank.stack).endswith("in <module>")
    assert "waits in all-reduce 'the last'" in text and "; for rank 1" in text
    # The history of the dead rank: its ring, and the last known line.
    assert dead.at == "step 17" and -100 < dead.since < 0
    assert "in step 17 since " in done.stderr
    before = dead.entries[-1]
    assert before.what == "gradient 599" and before.ended is not None
    assert len(dead.entries) == 512
    assert user_line(dead.stack).endswith("in misbehave")
    # A private file, named at the end of the summary.
    (file,) = files
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert f"flight recorder: {file}" in done.stderr
    assert "rank 1 is dead; it was in no collective; its last was" in done.stderr


def test_who_waits_who_is_stopped_and_who_is_elsewhere(tmp_path):
    done, text, dump, _ = incident(tmp_path, "stop", COLLECTIVE_STALL_SECONDS="2")
    assert dump.reason.startswith("no progress for ")
    assert [r.state for r in dump.ranks] == ["alive", "stopped", "alive"]
    assert "waits in all-reduce 'the last'" in text and "; for rank 1,2" in text
    assert "is stopped; it is in no collective" in text
    assert "is in no collective; its last was all-reduce 'gradient 599'" in text
    assert "in step 17 since " in text
    assert "in wait_for_the_dump" in "\n".join(dump.ranks[2].stack)
    assert done.returncode == 3


@pytest.mark.parametrize("how", ["end", "terminate"])
def test_a_job_that_is_ended_from_outside_says_whom_it_waited_for(tmp_path, how):
    done, text, dump, files = incident(tmp_path, how)
    assert done.returncode == 128 + signal.SIGTERM
    # The dump names the waiting or the awaited rank, the one that was seen first.
    cause = r"rank \d (\(process \d+\) died.*; rank 1 )?received signal 15"
    assert re.match(cause, dump.reason)
    assert len(files) == 1
    assert "waits in all-reduce 'the last'" in text and "; for rank 1" in text


def test_a_mismatch_says_what_each_rank_has_and_steers_no_terminal(tmp_path):
    done, text, dump, files = incident(tmp_path, "differ")
    assert done.returncode == 0  # the program caught it, and the job continued
    assert dump.reason.startswith("ranks do not agree on a collective")
    assert [r.entries[-1].bytes for r in dump.ranks] == [12, 16, 20]
    assert "rank 2 is in all-reduce 'evil \\x1b[31m' average float32 20 B" in text
    assert "\x1b" not in text + done.stderr
    assert len(files) == 1  # three ranks saw it, one wrote


def test_what_the_core_does_not_run_is_reported_too(tmp_path):
    _, text, dump, _ = incident(tmp_path, "mpi", COLLECTIVE_STALL_SECONDS="1")
    assert dump.reason.startswith("no progress for ")
    assert " s in by MPI of rank" in dump.reason
    assert "waits in all-reduce 'by MPI' 40 B since " in text


def test_nothing_is_reported_of_a_rank_that_leaves_in_good_order(tmp_path):
    """Here the others still need it: that is the incident, and not a death."""
    _, _, dump, files = incident(tmp_path, "leave")
    assert "rank 1 has shut down while others still wait" in dump.reason
    assert len(files) == 1


# Rank 1 of two dies after a third has joined; then the third dies.
COMES_AND_GOES = (
    PRELUDE
    + """
    import ctypes, threading
    from collective import library, recorder, session
    from collective.recorder import memory

    who = os.environ["COLLECTIVE_RANK"]
    if session.is_joining():
        session.enter()
    while collective.size() < 3:
        if collective.allgather(np.array([session.waiting()])).any():
            session.regroup()

    def others_wait(name):
        local = range(library.load().collective_recorder_local_size())
        ranks = [memory.read_rank(number, "", time.monotonic_ns()) for number in local]
        others = [r for r in ranks if r.state == "alive" and r.pid != os.getpid()]
        lasts = [other.entries[-1] for other in others]
        return all(last.what == name and last.started for last in lasts)

    def lose(dying, name):
        collective.allreduce(np.ones(5), name=f"before {name}")
        if who == dying:
            recorder.in_step(17, time.perf_counter())
            while not others_wait(name):
                time.sleep(0.05)
            if "HELD_SECONDS" in os.environ:
                time.sleep(1)  # until they are held
            os.kill(os.getpid(), signal.SIGKILL)
        if "HELD_SECONDS" in os.environ:  # the watching thread cannot run meanwhile
            held = int(os.environ["HELD_SECONDS"])
            threading.Timer(0.3, ctypes.PyDLL(None).sleep, [held]).start()
        try:
            collective.allreduce(np.ones(5), name=name)
        except collective.PeerLost:
            session.regroup()

    lose("1", "the first")
    lose("7", "the second")
    """
)


@pytest.mark.parametrize("late", [{}, {"HELD_SECONDS": "2"}], ids=["", "held"])
def test_those_who_joined_are_reported_by_their_present_number(late, tmp_path):
    variables = {"COLLECTIVE_MAX_NP": "3", "COLLECTIVE_RECORDER": str(tmp_path), **late}
    ranks = Ranks(2, COMES_AND_GOES, **variables)
    ranks.add([7], 8, COMES_AND_GOES, COLLECTIVE_JOINS="1", **variables)
    ended = ranks.finish()
    assert [code for code, _, _ in ended] == [0, -signal.SIGKILL, -signal.SIGKILL]
    files = sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    first, second = (parse_dump(file.read_text(), file.name) for file in files)
    assert [rank.name for rank in first.ranks] == [
        "rank 0", "rank 1", "rank 2 (joined as 7)"
    ]  # fmt: skip
    assert [rank.state for rank in first.ranks] == ["alive", "dead", "alive"]
    assert "rank 2 (joined as 7) waits in all-reduce 'the first'" in first.summary()
    # Now it has another number, and its old ring.
    assert second.reason.startswith("rank 1 (process ")
    assert [rank.state for rank in second.ranks] == ["alive", "dead"]
    waits = second.summary().splitlines()[1]
    assert (
        "rank 0 waits in all-reduce 'the second'" in waits and "; for rank 1" in waits
    )
    assert "rank 1 (joined as 7) is dead; it was in no collective" in second.summary()
    done = [entry.what for entry in second.ranks[1].entries]
    assert done[-1] == "before the second" and "before the first" in done
    assert second.ranks[1].at == "step 17"
    assert user_line(second.ranks[1].stack)


def made_up(rank, host, at, **entry):
    fields = {"kind": "all-reduce", "what": "w", "bytes": 4, "announced": -2.0}
    fields |= {"started": -2.0, "ended": None, "area": 0, "sequence": 7}
    entries = [Entry(1, **fields | entry)]
    return Dump("stalled", at, 2, [Rank(rank, 9, host, "alive", [], None, entries)])


def test_dumps_of_two_hosts_become_one(tmp_path, capsys):
    files = [tmp_path / "a", tmp_path / "b"]
    files[0].write_text(made_up(0, "a", 100.0).text())
    files[1].write_text(made_up(1, "b", 101.5, sequence=6, ended=-1.0).text())
    assert "nothing here of rank 1, on other hosts" in files[0].read_text()
    assert reader.main([str(file) for file in files]) == 0
    merged = capsys.readouterr().out
    assert "2 of 2 ranks, on a, b" in merged and "nothing here of" not in merged
    assert "waits in all-reduce 'w' 4 B since 2.0 s; for rank 1" in merged
    assert parse_dump(merged, "it").ranks[1].entries[0].ended == 0.5  # 1.5 s later


@pytest.mark.parametrize("text", ["", "something else\n", '{"collective": 1}\n'])
def test_a_file_that_is_no_dump_is_refused(tmp_path, capsys, text):
    file = tmp_path / "file"
    file.write_text(text)
    assert reader.main([str(file)]) == 2
    assert "is not a dump of the flight recorder" in capsys.readouterr().err
    assert reader.main([str(tmp_path / "missing")]) == 2


def test_it_can_be_switched_off(tmp_path):
    command = [*launch.command("native", 2), sys.executable, "-c"]
    script = "import collective; collective.init(); from collective import recorder"
    env = launch.environment(COLLECTIVE_RECORDER="off")
    statement = "print(recorder._opened)"
    done = launch.capture(
        [*command, f"{script}; {statement}"], 120, env=env, cwd=tmp_path
    )
    assert done.stdout.count("None") == 2
    assert not os.listdir(tmp_path)
