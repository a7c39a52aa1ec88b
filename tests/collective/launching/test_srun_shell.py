"""srun in place of ssh: the command that it gets, and mpirun's view of Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from collective.launch import command_line, slurm_job

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_ARRAY_TASK_ID": "3",
}


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an srun that prints its words and its variables."""
    program = tmp_path / "srun"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --help ] && echo "$OPTIONS" && exit\n'
        'for word; do echo "$word"; done; env | grep ^SLURM_ | sort\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in [n for n in os.environ if n.startswith(("SLURM_", slurm_job.JOB))]:
        monkeypatch.delenv(name)
    return program


def started(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run(
        [slurm_job.SHELL, *words], env=env, capture_output=True, text=True, timeout=120
    )


def test_the_command_becomes_a_step_of_the_job(srun):
    options = ["-x", "-o", "BatchMode=yes", "-p", "22", "me@n2", "echo", "'a  b'"]
    done = started(*options, OPTIONS="--overlap", **JOB)
    words = done.stdout.splitlines()
    assert words[:2] == ["--jobid=7", "--overlap"] and "--nodelist=n2" in words
    # The job's own options for its tasks do not apply to this step.
    assert words[-4:] == ["sh", "-c", "echo 'a  b'", "SLURM_CONF=/etc/slurm.conf"]
    assert not done.stderr


def test_a_srun_without_overlap_is_named(srun):
    done = started("n1", "true", OPTIONS="--exclusive", **{slurm_job.JOB: "8"})
    assert "--jobid=8" in done.stdout and "--overlap" not in done.stdout
    assert "this srun has no --overlap" in done.stderr
    outside = started("n1", "true")
    assert outside.returncode and "not in a Slurm job" in outside.stderr


def test_the_launcher_takes_srun_in_a_job_only(srun, monkeypatch):
    def shell(*options):
        return command_line.parse([*options, "-np", "2", "true"]).shell.program

    assert shell() == "ssh"
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    assert shell() == str(slurm_job.SHELL)
    assert shell("--remote-shell", "ssh") == "ssh"
    srun.unlink()
    monkeypatch.setenv("PATH", str(srun.parent))
    assert shell() == "ssh"


def test_mpirun_sees_nothing_of_slurm_and_ranks_see_their_job():
    assert slurm_job.hidden({**JOB, "PATH": "/bin"}) == [
        *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_GPUS_PER_TASK"),
        "SLURM_ARRAY_TASK_ID",
    ]
    assert slurm_job.for_mpirun(JOB) == {
        slurm_job.JOB: "7"
    } and not slurm_job.for_mpirun({})
    assert slurm_job.for_ranks(JOB) == {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
