"""What is shown of the ranks, and where it goes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from collective.hosts import Host, is_local
from collective.launch import output

ROOT = Path(__file__).parents[3]
LAUNCH = [sys.executable, "-m", "collective.launch"]
pytestmark = pytest.mark.launches


def launch(*arguments):
    return subprocess.run(
        [*LAUNCH, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


RAISES = (
    "import os, sys, time\n"
    "rank = os.environ['COLLECTIVE_RANK']\n"
    "print('out', rank, flush=True); print('err', rank, file=sys.stderr, flush=True)\n"
    "if rank == '1': raise RuntimeError('of rank ' + rank)\n"
    "time.sleep(60)"
)


@pytest.mark.parametrize("to_files", [True, False])
def test_the_last_on_the_screen_is_who_failed_and_why(tmp_path, to_files):
    files = ["--output-filename", str(tmp_path / "out")] if to_files else []
    done = launch("-np", "2", *files, sys.executable, "-c", RAISES)
    assert done.returncode == 1
    last = done.stderr.splitlines()
    assert last[-1] == "collective.launch: rank 1 failed: it ended with exit code 1"
    assert last[-2] == "RuntimeError: of rank 1"
    assert ("[1] out 1" in done.stdout) is not to_files
    if to_files:
        assert (tmp_path / "out/rank.1/stdout").read_text() == "out 1\n"
        assert (tmp_path / "out/rank.1/stderr").read_text().startswith("err 1\nTrace")


def test_numbers_of_files_are_as_wide_as_the_largest(tmp_path):
    made = output.RankOutput(3, 11, output.OutputStyle(directory=tmp_path))
    made.finish(0)
    assert (tmp_path / "rank.03" / "stderr").exists()


def test_where_no_file_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = launch("-np", "1", "--output-filename", str(tmp_path / "file"), "true")
    assert done.returncode == 2
    assert "cannot write" in done.stderr and "HINT: --output-filename" in done.stderr


def test_each_line_with_its_time():
    done = launch("-np", "1", "--prefix-output-with-timestamp", "echo", "hello")
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
    assert re.fullmatch(stamp + r" \[0\] hello\n", done.stdout)


def test_dry_run_starts_nothing(tmp_path):
    done = launch("-np", "2", "--dry-run", "touch", str(tmp_path / "x"))
    assert done.returncode == 0 and not (tmp_path / "x").exists()
    assert "[1] " in done.stdout and "COLLECTIVE_RANK=1" in done.stdout


def test_several_names_of_this_host_are_one_host():
    # In one piece: without prefixes, the ranks' own writes mix.
    code = (
        "import os; os.write(1, os.environ['COLLECTIVE_LOCAL_SIZE'].encode() + b'\\n')"
    )
    hosts = "localhost:1,127.0.0.1:2"
    done = launch("-H", hosts, "--no-prefix", sys.executable, "-c", code)
    assert (done.stdout, done.returncode) == ("3\n" * 3, 0), done.stderr


def test_what_a_rank_started_dies_with_a_killed_launcher():
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('here', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [*LAUNCH, "-np", "2", sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    for _ in range(2):
        assert b"here" in process.stdout.readline()
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 5  # two ranks, a child of each, the watchdog
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not psutil.wait_procs(family, timeout=20)[1]


def test_last_error_lines():
    first = ["Traceback (most recent call last):", "  a", "Error: 1"]
    second = ["Traceback (most recent call last):", "  b", "Error: 2", ""]
    assert output.last_error_lines(["x", *first, "y", *second]) == second[:-1]
    assert output.last_error_lines([str(i) for i in range(50)])[0] == "38"
    deep = [*second[:1], *(f"  {i}" for i in range(100)), "Error: deep"]
    words = output.last_error_lines(deep)
    assert (words[0], words[-1], "  ..." in words) == (deep[0], deep[-1], True)
    assert output.last_error_lines([]) == []


def test_which_hosts_are_this_one():
    assert all(is_local(Host(n)) for n in ("localhost", "127.0.0.1", "127.0.0.2"))
    assert not is_local(Host("192.0.2.77"))
    assert not is_local(Host("nowhere.invalid"))
    assert not is_local(Host("localhost", user="somebody"))
