"""A run in processes of its own: its end, and no process that stays."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import psutil
import pytest

from collective.comparison import launching
from tests import launch

pytestmark = pytest.mark.launches


def run(program: str, seconds: float = 120) -> launching.CompletedRun:
    return launching.run([sys.executable, "-c", program], seconds)


def test_reports_how_it_ended_and_its_last_lines():
    many = f"for i in range({launching.TAIL + 9}): print('line', i)"
    ended = run(f"{many}\nraise SystemExit(3)")
    assert ended.code == 3 and ended.failure == "ended with exit code 3"
    assert len(ended.tail.splitlines()) == launching.TAIL
    assert ended.tail.endswith(f"line {launching.TAIL + 8}")
    assert run("").failure == ""


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """Return a file; the time of a run counts from the moment when it exists."""
    file, start = tmp_path / "ready", launching.processes.start

    def start_and_await(*arguments, **more):
        process = start(*arguments, **more)
        launch.await_that(file.exists)
        return process

    monkeypatch.setattr(launching.processes, "start", start_and_await)
    return file


def test_is_ended_at_its_deadline_with_all_it_has_started(ready):
    ended = run(
        "import pathlib, subprocess, sys\n"
        "sleeps = [sys.executable, '-c', 'import time; time.sleep(1000)']\n"
        "child = subprocess.Popen(sleeps)\n"
        "print(child.pid, flush=True)\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "child.wait()",
        seconds=0.5,
    )
    assert ended.failure == "did not end in time"
    with contextlib.suppress(psutil.NoSuchProcess):  # it only got the signal to end
        psutil.Process(int(ended.tail)).wait(launch.PATIENCE_SECONDS)


def test_lets_what_outlives_the_launcher_clean_up(ready):
    """An example is horovodrun, which ends before its mpirun."""
    left = ready
    cleans_up = (
        "import pathlib, signal, sys, time\n"
        f"left = pathlib.Path({str(left)!r})\n"
        "def end(*_):\n"
        "    time.sleep(0.5)\n"
        "    left.unlink()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "left.touch()\n"
        "time.sleep(1000)"
    )
    ended = run(
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {cleans_up!r}]).wait()",
        seconds=0.5,
    )
    assert ended.code is None and not left.exists()


def test_ends_with_the_process_that_asked_for_it():
    asks = (
        "import sys\n"
        "from collective.comparison import launching\n"
        "launching.run([sys.executable, '-c', 'import time; time.sleep(1000)'], 900)"
    )
    asking = subprocess.Popen(
        [sys.executable, "-c", asks], cwd=launch.ROOT, env=launch.environment()
    )
    started: list[psutil.Process] = []
    while not started:
        assert asking.poll() is None
        time.sleep(0.05)
        started = psutil.Process(asking.pid).children()
    asking.kill()
    asking.wait()
    assert not psutil.wait_procs(started, timeout=launch.PATIENCE_SECONDS)[1]
