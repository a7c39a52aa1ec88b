"""The check of every host before mpirun starts, and the report at the end."""

from __future__ import annotations

import errno
import socket
import sys
from pathlib import Path

import pytest

from collective.launch import processes, reachability, versions
from collective.launch.relay import Relay
from collective.net import interfaces
from tests.launch import capture

ROOT = Path(__file__).parents[3]


def test_an_answer_or_why_there_is_none():
    good = processes.run(
        ["sh", "-c", "echo out; echo some >&2; echo words >&2; exit 3"], 20
    )
    assert good == processes.Result(3, "out\n", "some words")
    assert processes.run(["sleep", "1000"], 0.1) == processes.Result(
        None, "", "no answer in 0.1 s"
    )
    endless = processes.run(["yes"], 100)
    assert endless == processes.Result(None, "", "more than 1 MB of output")
    none = processes.run(["/no/such/program"], 1)
    assert (
        none.code is None
        and none.error == "/no/such/program: No such file or directory"
    )


def test_what_differs_is_reported_with_who_has_it():
    found = {
        "a": {"python": "3.11", "keras": "3.15", "horovod": "0.28"},
        "b": {"python": "3.11", "keras": "3.14"},
        "c": {"python": "3.11", "keras": "3.14"},
    }
    assert versions.differing(found) == {
        "keras": "3.15 on a; 3.14 on b, c",
        "horovod": "0.28 on a; none on b, c",
    }


def test_a_connection_back(monkeypatch):
    mine = [interfaces.Interface("lo", "127.0.0.5/8")]
    monkeypatch.setattr(interfaces, "interfaces", lambda: mine)
    with reachability.listening(["lo"], "secret") as words:
        host = words[0].partition(":")[0]
        assert reachability.why_cut_off(words, "secret") == ""
        assert reachability.why_cut_off([], "secret") == ""
        # Some other program on another host has the port.
        message = reachability.why_cut_off(words, "another")
        assert message.startswith(f"no connection from it to {host}: another program")
    message = reachability.why_cut_off(words, "secret")
    assert message == f"no connection from it to {host}: Connection refused"


def test_the_way_back_stays_open_where_descriptors_run_out(monkeypatch):
    """Many idle connections may occupy all descriptors for a while."""
    mine = [interfaces.Interface("lo", "127.0.0.5/8")]
    monkeypatch.setattr(interfaces, "interfaces", lambda: mine)
    failures = [OSError(errno.EMFILE, "Too many open files")] * 3
    accept = socket.socket.accept

    def fails_first(listener):
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails_first)
    with reachability.listening(["lo"], "secret") as words:
        assert reachability.why_cut_off(words, "secret") == ""
    assert not failures


def relay(*lines: str) -> tuple[Relay, list[bool]]:
    """Return a relay that has read lines, and for each whether it shows it."""
    made = Relay()
    return made, [made._is_shown(f"collective.launch: {line}\n") for line in lines]


def test_a_network_that_leads_nowhere_is_known_by_its_address(monkeypatch):
    heard, _ = relay("rank 1 on b started")
    heard._is_shown("  Message:    connect() to 10.79.0.1:1025 failed\n")
    assert heard.unreachable == "10.79.0.1"
    mine = [interfaces.Interface(f"eth{i}", f"10.7{i}.0.9/24") for i in (7, 9)]
    monkeypatch.setattr(interfaces, "interfaces", lambda: mine)
    assert interfaces.others("10.79.0.1") == ["eth7"]


def test_the_rank_that_was_killed_is_to_blame():
    heard, shown = relay(
        "rank 0 on a started",
        "rank 1 on a started",
        "rank 2 on b started",
        "rank 3 on b started",
        "rank 0 on a ended with exit code 14",  # its MPI found a broken connection
        "rank 3 on b ended by SIGKILL",
        "rank 2 on b ended by SIGSEGV",
    )
    assert heard.failed is not None
    assert (heard.failed.rank, heard.failed.host, heard.failed.code) == (3, "b", 137)
    assert shown == [False] * 4 + [True] * 3
    assert heard.unfinished == [1]


def test_else_the_first_that_failed_is_to_blame():
    heard, shown = relay(
        "rank 0 on a ended with exit code 0",
        "rank 2 on b ended with exit code 7",
        "rank 1 on a ended by SIGABRT",
    )
    assert heard.failed is not None and heard.failed.code == 7
    assert shown == [False, True, True]


def test_a_rank_may_print_the_log_of_another_job(capsys):
    """Messages of its own supervisor carry a word that no other job has."""
    heard = Relay(lambda early: None, word="1f2e3d4c")
    line = "collective.launch: rank 1 on a{} ended with exit code 3\n"
    assert heard._is_shown(f"[0] {line}".format(""))
    assert heard._is_shown(line.format(" 2f2e3d4c"))
    assert heard._is_shown("[0] collective.launch: rank 1 on a ended by SIGXXX\n")
    assert heard._is_shown("[0] collective.launch: rank 2 on a started\n")
    for before in ("[0]", "2026-11-27 12:00:00.000+00:00 [0]"):
        assert heard._is_shown(f"{before}   Remote daemon : [x@0,1] on node b\n")
    assert (heard.ends, heard.started, heard.lost_hosts) == ({}, {}, [])
    assert heard._is_shown(line.format(" 1f2e3d4c")) and heard.ends[1].code == 3
    heard._write(sys.stdout, line.format(" 1f2e3d4c"))
    assert capsys.readouterr().out == line.format("")


def test_a_real_time_signal_is_understood():
    heard, _ = relay("rank 1 on a ended by SIGRT36", "rank 0 on a ended by SIGRTMIN")
    assert [heard.ends[r].code for r in (1, 0)] == [128 + 36, 128 + 34]


@pytest.mark.launches
@pytest.mark.parametrize(
    "lost",
    [
        "",
        "echo '  Remote daemon : [x@0,1] on node b' >&2",
        "echo 'A daemon failed to report back after being spawned. This could' >&2\n"
        "echo '  Remote host:    b' >&2\nexit 1",
    ],
    ids=["unnamed", "named", "by its shell"],
)
def test_a_lost_host_is_a_failure_whatever_mpirun_says(tmp_path, lost):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        "#!/bin/sh\n"
        "[ $1 = --version ] && echo 'mpirun (Open MPI) 5.0.11' && exit\n"
        "w=${*#*--word }\n"
        "for r in 0 1; do\n"
        '  echo "collective.launch: rank $r on b ${w%% *} started" >&2\n'
        f"done\n{lost}\n"
    )
    mpirun.chmod(0o755)
    command = [sys.executable, "-m", "collective.launch", "--mpi", "-np", "2"]
    done = capture([*command, "--mpirun", str(mpirun), "true"])
    assert done.returncode == 1
    assert "connection to b was lost; what became of rank 0, 1 of 2" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("HINT: see whether the host runs")
