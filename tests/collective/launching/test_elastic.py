"""Ranks of this host that join and leave with its slots: the launcher and the core alone."""

from __future__ import annotations

import sys
import time

import pytest

from collective.errors import UsageError
from collective.launch.discovery import Discovery
from tests.launch import NEEDS_CORE, capture

# Rank 0 changes the slots as soon as the number of ranks is the one that it set.
PROGRAM = """
import os, signal, sys
from pathlib import Path
import numpy as np
import collective
from collective import session
from collective.elastic.preemption import LEAVES, Preemption

slots = Path(sys.argv[1])
collective.init()
if session.is_joining():
    if os.environ["COLLECTIVE_RANK"] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    session.enter()
sizes, asked = [], [3, 1]
with Preemption() as notices:
    while True:
        news = collective.allgather(np.array([notices.flags()]))
        if news[collective.rank()] & LEAVES:
            session.leave()
            sys.exit(0)
        if news.any():
            session.regroup()
            continue
        size = collective.size()
        sizes += [size] * (size not in sizes[-1:])
        wanted = int(collective.broadcast(np.array([int(slots.read_text()[10:])]))[0])
        if size == wanted == 1:
            break
        if size == wanted and collective.rank() == 0:
            slots.with_suffix(".part").write_text(f"localhost:{asked.pop(0)}")
            slots.with_suffix(".part").rename(slots)
print(sizes[0], max(sizes), sizes[-1], os.environ["COLLECTIVE_RANK"])
"""


@pytest.mark.launches
@NEEDS_CORE
def test_ranks_come_and_go_with_the_slots(tmp_path):
    slots = tmp_path / "slots"
    slots.write_text("localhost:2")
    command = [sys.executable, "-m", "collective.launch"]
    command += ["--min-np", "1", "--max-np", "3"]
    command += ["--host-discovery-script", f"cat {slots}"]
    ended = capture([*command, sys.executable, "-c", PROGRAM, str(slots)])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[0] 2 3 1 0\n", ended.stderr
    assert "rank 2 ended by SIGKILL" in ended.stderr  # before it had joined
    assert "rank 3 is started to join the job" in ended.stderr
    assert "rank 3 is asked to leave: the job has slots for 1 rank" in ended.stderr


@pytest.mark.parametrize(
    ("script", "slots", "wanted"),
    [
        ("echo localhost:3", None, 3),
        ("echo localhost", 4, 4),
        ("echo localhost:2; echo other:8", None, 10),
        ("true", None, 0),
    ],
)
def test_what_a_script_reports(script, slots, wanted):
    with Discovery(script, slots) as discovery:
        pass
    assert sum(host.slots for host in discovery.hosts) == wanted


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("false", "false failed: exit code 1\n"),
        ("echo localhost:many", "slots=many: not a whole number"),
        ("sleep 1000", "sleep 1000 failed: no answer in 0.5 s\n"),
        ("yes localhost", "failed: more than 1 MB of output\n"),
        ("head -c 5000000 /dev/zero", "failed: more than 1 MB of output\n"),
    ],
)
def test_a_script_that_fails(script, why):
    seconds = 0.5 if script.startswith("sleep") else 60
    with pytest.raises(UsageError) as caught, Discovery(script, seconds=seconds):
        pass
    assert why in str(caught.value)


def test_a_script_may_leave_a_daemon_behind():
    """The daemon holds the script's output, which was read to its end."""
    began = time.monotonic()
    with Discovery("echo localhost:2; setsid sleep 60 &") as discovery:
        assert discovery.hosts
    assert time.monotonic() - began < 50


# The job must not end before rank 0 has printed its place.
SHOWS_PLACE_AND_DIES = """
import os, signal, sys, time
rank = int(os.environ["HOROVOD_RANK"])
print(sorted(i for i in os.environ.items() if i[0].startswith("HOROVOD_")), flush=True)
if rank:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
open(sys.argv[1], "w").close()
time.sleep(1000)
"""


@pytest.mark.launches
def test_a_job_whose_ranks_change_too_often_ends(tmp_path):
    command = [sys.executable, "-m", "collective.launch", "-np", "2", "--min-np", "1"]
    command += ["--max-np", "2", "--reset-limit", "1"]
    command += ["--blacklist-cooldown-range", "1", "2"]
    command += [sys.executable, "-c", SHOWS_PLACE_AND_DIES, str(tmp_path / "shown")]
    ended = capture(command)
    assert ended.returncode == 1, ended.stderr
    assert "the ranks of the job have changed 2 times; ending it" in ended.stderr
    # Each rank's place, by horovodrun's names.
    first = sorted(line for line in ended.stdout.splitlines() if "[0]" in line)[0]
    for name, value in (("RANK", 0), ("SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_SIZE", 2)):
        assert f"('HOROVOD_{name}', '{value}')" in first
    assert "('HOROVOD_CROSS_RANK', '0'), ('HOROVOD_CROSS_SIZE', '1')" in first
