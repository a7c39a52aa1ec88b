"""Input and output of a script: every rank gets what rank 0 reads; a line is shown once."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time

import pytest

from collective.launch import terminal
from tests import launch

KERAS = [sys.executable, "-m", "collective.launch", "-np", "2", "--keras"]
SCRIPT = """
import json, os, pdb, sys, time
import keras

found = [input("epochs? "), sys.stdin.readline(), [*sys.stdin]]
try:
    input()
except EOFError:
    found.append("end")
for stop in (breakpoint, pdb.set_trace):
    try:
        stop()
    except Exception as error:
        found.append(str(error).split("HINT: ")[1].split(";")[0])
with open(f"{sys.argv[1]}/{os.environ['COLLECTIVE_RANK']}", "w") as file:
    json.dump(found, file)
time.sleep(1.2 * int(os.environ["COLLECTIVE_RANK"]))  # longer than a line waits for others
print(time.strftime("%H:%M:%S"), "a line of all ranks", file=sys.stderr)
"""
HINT = "collectiverun -np 1 --keras script.py"


@pytest.mark.launches
@launch.NEEDS_CORE
def test_every_rank_gets_what_rank_0_reads(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = launch.capture(
        [*KERAS, str(script), str(tmp_path)],
        input="3\nzwölf\na\nb",
        env=launch.environment(forked=True),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "epochs? "
    assert done.stderr.count("a line of all ranks") == 1, done.stderr
    for rank in "01":
        found = json.loads((tmp_path / rank).read_text())
        assert found == ["3", "zwölf\n", ["a\n", "b"], "end", HINT, HINT]


def test_what_is_typed_is_passed_on(monkeypatch):
    ours, theirs = pty.openpty()
    monkeypatch.setattr(terminal, "_POLL_SECONDS", 0.01)
    foreground = [False]
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() if foreground[0] else 0)
    with subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as cat:
        thread = threading.Thread(target=terminal._copy, args=(theirs, cat.stdin))
        thread.start()
        os.write(ours, b"a line\n")
        time.sleep(0.05)
        assert thread.is_alive()  # in the background nothing is read
        foreground[0] = True
        assert cat.stdout.readline() == b"a line\n"
        os.write(ours, b"\x04")
        thread.join(launch.PATIENCE_SECONDS)
        assert cat.wait(launch.PATIENCE_SECONDS) == 0
    os.close(ours)
    os.close(theirs)
