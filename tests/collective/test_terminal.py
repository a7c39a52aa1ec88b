"""The test of standard output for a terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from collective.launch import processes
from collective.streams import is_terminal
from tests import launch

ASKS = (
    "import sys\n"
    "from collective.streams import is_terminal\n"
    "print(sys.stdout.isatty(), is_terminal())\n"
)


def test_a_pipe_or_a_closed_stream_is_no_terminal(tmp_path):
    with (tmp_path / "file").open("w") as file:
        assert not is_terminal(file)
    assert not is_terminal(file) and not is_terminal(object())


def test_a_terminal_is_one(monkeypatch):
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    other, mine = os.openpty()
    with os.fdopen(mine, "w") as stream:
        assert is_terminal(stream)
        # Without an mpirun above it is unknown.
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        assert not is_terminal(stream)
    os.close(other)


@pytest.mark.launches
@pytest.mark.skipif(not processes.find_program("mpirun"), reason="there is no mpirun")
def test_mpirun_into_a_pipe_is_no_terminal():
    """Open MPI gives the rank a terminal even so."""
    command = [*launch.command("mpi", 1), sys.executable, "-c", ASKS]
    code, printed = launch.run(command, launch.environment(), 60)
    assert code == 0 and printed.split()[-1] == "False", printed
    if not shutil.which("script"):
        return
    line = " ".join(f"'{word}'" for word in command)
    shown = launch.capture(
        ["script", "-qec", line, "/dev/null"], stdin=subprocess.DEVNULL
    )
    assert shown.stdout.split()[-1] == "True", shown.stdout
