"""Effects of a shell on a job: nohup, Ctrl-Z, a memory limit, a removed folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch
from tests.faults.job import small_disk, why_no_mounts

pytestmark = [launch.NOT_ON_RANKS, pytest.mark.launches]
SECONDS = 120.0  # because the machine may be busy
MEMORY = Path("/sys/fs/cgroup/memory")  # cgroups of version 1


def started(*words: str, ranks: int = 2, **popen) -> subprocess.Popen:
    return subprocess.Popen(
        [*launch.command("native", ranks), *words],
        env=launch.environment(),
        text=True,
        **{
            "cwd": launch.ROOT,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            **popen,
        },
    )


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_nohup_outlives_its_terminal():
    def ignores() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    job = started("sh", "-c", "echo $$; sleep 1; echo done", preexec_fn=ignores)
    assert job.stdout is not None
    job.stdout.readline()
    job.send_signal(signal.SIGHUP)
    printed = job.communicate(timeout=SECONDS)[0]
    assert job.returncode == 0 and printed.count("done") == 2, printed


def test_ctrl_z_stops_the_ranks_until_the_job_continues(tmp_path):
    # Ranks wait in their shell alone: a shell that starts a program could be stopped
    # between fork and exec, and then it shows as D.
    go_on = tmp_path / "go on"
    os.mkfifo(go_on)
    job = started("sh", "-c", f"echo $$; : < '{go_on}'; echo done")
    assert job.stdout is not None
    ranks = [int(job.stdout.readline().split()[-1]) for _ in range(2)]
    job.send_signal(signal.SIGTSTP)
    launch.await_that(lambda: all(map(is_stopped, [job.pid, *ranks])))
    with open(os.open(go_on, os.O_RDWR)):
        job.send_signal(signal.SIGCONT)
        printed = job.communicate(timeout=SECONDS)[0]
    assert job.returncode == 0 and printed.count("done") == 2, printed


def test_a_rank_that_the_kernel_has_killed_for_lack_of_memory():
    group = MEMORY / f"collective-tests-{os.getpid()}"
    with contextlib.suppress(OSError):
        group.mkdir()
    limit = group / "memory.limit_in_bytes"
    if not os.access(limit, os.W_OK):
        pytest.skip("no cgroup with a limit on memory can be made here")
    limit.write_text(str(60 << 20))
    asks = f"open('{group}/tasks', 'w').write('0'); print(len(bytearray(1 << 28)))"
    try:
        job = started(sys.executable, "-c", asks, ranks=1)
        printed = job.communicate(timeout=SECONDS)[0]
    finally:
        group.rmdir()
    assert job.returncode == 128 + signal.SIGKILL
    assert "for lack of memory" in printed and "HINT" in printed, printed


@pytest.mark.skipif(bool(why_no_mounts()), reason=why_no_mounts())
def test_no_room_for_the_files_of_mpirun(tmp_path):
    with small_disk(tmp_path / "full", "16k") as folder:
        with contextlib.suppress(OSError):
            (folder / "filler").write_bytes(bytes(1 << 16))
        environment = launch.environment(TMPDIR=str(folder))
        ended = subprocess.run(
            [*launch.command("native", 2), "--mpi", "true"],
            cwd=launch.ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert ended.returncode and f"HINT: {folder} is full" in ended.stderr, ended.stderr


@pytest.mark.parametrize("stream, code", [("stdout", 1), ("stderr", 0)])
def test_a_full_disk_that_loses_what_ranks_print(stream, code):
    """The ranks continue; only lost lines of stderr do not fail the job."""
    both = "import sys; print('line'); print('line', file=sys.stderr)"
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        job = started(sys.executable, "-c", both, ranks=1, **streams)
        printed = "".join(text or "" for text in job.communicate(timeout=SECONDS))
    assert job.returncode == code and printed.count("line\n") == 1, printed
    if stream == "stdout":
        message = "what ranks print is lost: /dev/full: No space left on device; "
        assert printed.count(message) == 1 and "HINT: free some space" in printed


def test_a_working_directory_that_was_removed(tmp_path):
    folder = tmp_path / "removed"
    folder.mkdir()
    begins = f"import os, sys; os.chdir('{folder}'); os.rmdir('{folder}'); "
    program = begins + "import collective; collective.init(); print('met')"
    job = started(sys.executable, "-c", program, ranks=1)
    printed = job.communicate(timeout=SECONDS)[0]
    assert job.returncode == 0 and "met" in printed, printed
