"""``--requeue-on``: what is asked of Slurm, and when."""

from __future__ import annotations

import os
import signal

import pytest

from collective.elastic import generations
from collective.errors import UsageError
from collective.launch import command_line
from collective.launch.slurm_job import Requeue, signal_of


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A Slurm job whose scontrol writes its words to a file; code 1 where asked for."""
    program = tmp_path / "scontrol"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n'
        f"test ! -e {tmp_path}/refuses || {{ echo no such job >&2; exit 1; }}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path


def test_the_job_starts_again_only_if_its_ranks_ended_for_that(scontrol, capsys):
    before = signal.getsignal(signal.SIGUSR1)
    try:
        asked = Requeue(signal_of("usr1"))
        asked.listen()
        assert asked.finish(generations.EXIT_CODE) == generations.EXIT_CODE
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asked.requested
        assert (asked.finish(0), asked.finish(3)) == (0, 3)  # done; or failed by itself
        assert not (scontrol / "said").exists()
        assert asked.finish(generations.EXIT_CODE) == 0
        assert (scontrol / "said").read_text() == "requeue 7\n"
        (scontrol / "refuses").touch()
        assert asked.finish(generations.EXIT_CODE) == generations.EXIT_CODE
        assert "does not start job 7 again: no such job" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_cannot_be_requeued_is_refused(scontrol, monkeypatch):
    with pytest.raises(UsageError, match="one of USR1"):
        signal_of("KILL")
    with pytest.raises(UsageError, match="--requeue-on with --max-np"):
        command_line.parse(
            ["--requeue-on", "USR1", "--max-np", "2", "-np", "2", "true"]
        )
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(UsageError, match="this is not a Slurm job"):
        Requeue(signal.SIGUSR1)
