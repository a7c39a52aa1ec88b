"""mpirun's line for each MPI; the line of the installed MPI also runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from collective.errors import UsageError
from collective.hosts import Host
from collective.launch import mpi
from collective.launch.mpi import MPI, compose, recognize, shell_line
from collective.launch.options import LaunchOptions
from collective.launch.remote_shell import RemoteShell
from tests.launch import PATIENCE_SECONDS, capture

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.launches
OPEN_4 = MPI("Open MPI", (4, 1, 8), "mpirun")
OPEN_5 = MPI("Open MPI", (5, 0, 11), "mpirun")
MPICH = MPI("MPICH", (5, 0, 2), "mpirun")
INTEL = MPI("Intel MPI", (2021, 14), "mpirun")


@pytest.mark.parametrize(
    "output, wanted",
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to", OPEN_4),
        ("mpirun (Open MPI) 5.0.11\n", OPEN_5),
        ("HYDRA build details:\n    Version:         5.0.2\n    Release", MPICH),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 2024", INTEL),
        ("mpirun (Open MPI) 5.1.0a1", MPI("Open MPI", (5, 1, 0), "mpirun")),
        ("something else 1.2.3", None),
    ],
)
def test_which_mpi(output, wanted):
    assert recognize(output, "mpirun") == wanted


TWO = [Host("a", 2), Host("b", 1)]
JOE = [Host("a", 2, user="joe"), Host("::1", 1)]
FULL = (
    LaunchOptions(
        nics=["eth0", "eth1"],
        tcp=True,
        mpi_args=["--verbose"],
        shell=RemoteShell("/bin/rsh", port=22),
    ),
    TWO,
    ["python", "a b.py"],
    {"X": "1"},
    ["PATH"],
)


def job(hosts, **options):
    return LaunchOptions(**options), hosts, ["true"]


# The wheels of Open MPI 4.1.8 and 5.0.11 and of MPICH 5.0.2 accept these words;
# tests/hosts/test_mpis.py tries them.
@pytest.mark.parametrize(
    "kind, wanted, line",
    [
        (
            OPEN_4,
            job(TWO),
            "mpirun -np 3 -H a:2,b:1 --map-by slot --bind-to none "
            "--mca plm_rsh_no_tree_spawn 1 --mca oob_tcp_keepalive_time 5 --mca oob_tcp_keepalive_intvl 1 "
            "--mca oob_tcp_keepalive_probes 5 true",
        ),
        (
            OPEN_5,
            job(JOE, binding_args=["--bind-to", "core"]),
            r"printf 'joe@a slots=2\n::1 slots=1\n' > hosts.collective && "
            "mpirun -np 3 --hostfile hosts.collective --bind-to core "
            "--prtemca plm_ssh_no_tree_spawn 1 --prtemca oob_tcp_keepalive_time 5 --prtemca oob_tcp_keepalive_intvl 1 "
            "--prtemca oob_tcp_keepalive_probes 5 true",
        ),
        (
            MPICH,
            job([Host("a", 2, user="joe")]),
            "mpirun -np 2 -hosts joe@a:2 -bind-to none true",
        ),
        (
            INTEL,
            job(TWO),
            r"printf 'a:2\nb:1\n' > hosts.collective && "
            "mpirun -np 3 -machinefile hosts.collective true",
        ),
        (
            OPEN_4,
            FULL,
            "mpirun -np 3 -H a:2,b:1 --map-by slot --bind-to none "
            "--mca plm_rsh_agent /bin/rsh --mca plm_rsh_args '-p 22' "
            "--mca plm_rsh_no_tree_spawn 1 "
            "--mca oob_tcp_if_include eth0,eth1 --mca btl_tcp_if_include eth0,eth1 "
            "--mca pml ob1 --mca btl tcp,self,vader "
            "--mca oob_tcp_keepalive_time 5 --mca oob_tcp_keepalive_intvl 1 "
            "--mca oob_tcp_keepalive_probes 5 -x PATH -x X=1 --verbose "
            "python 'a b.py'",
        ),
        (
            OPEN_5,
            FULL,
            "mpirun -np 3 -H a:2,b:1 --map-by slot --bind-to none "
            "--prtemca plm_ssh_agent /bin/rsh --prtemca plm_ssh_args '-p 22' "
            "--prtemca plm_ssh_no_tree_spawn 1 "
            "--prtemca oob_tcp_if_include eth0,eth1 "
            "--mca btl_tcp_if_include eth0,eth1 "
            "--mca pml ob1 --mca btl tcp,self,sm "
            "--prtemca oob_tcp_keepalive_time 5 --prtemca oob_tcp_keepalive_intvl 1 "
            "--prtemca oob_tcp_keepalive_probes 5 -x PATH -x X=1 --verbose "
            "python 'a b.py'",
        ),
        (
            MPICH,
            FULL,
            "env 'HYDRA_LAUNCHER_EXTRA_ARGS=-p 22' mpirun -np 3 -hosts a:2,b:1 "
            "-bind-to none -launcher-exec /bin/rsh -iface eth0 "
            "-genv FI_PROVIDER tcp -genv X 1 --verbose python 'a b.py'",
        ),
    ],
    ids=["open4", "users", "mpich", "intel", "open4-full", "open5-full", "mpich-full"],
)
def test_line(kind, wanted, line, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert shell_line(compose(kind, *wanted)) == line


def test_how_long_a_host_may_be_silent_is_an_option():
    more = ["--prtemca", "oob_tcp_keepalive_time", "60"]
    words = compose(OPEN_5, *job(TWO, mpi_args=more))
    assert words.count("oob_tcp_keepalive_time") == 1
    words = compose(OPEN_5, *job(TWO, heartbeat=4))
    assert words[words.index("oob_tcp_keepalive_time") + 1] == "2"
    assert words[words.index("oob_tcp_keepalive_probes") + 1] == "2"
    assert "oob_tcp_keepalive_time" not in compose(OPEN_5, *job(TWO[:1]))


def test_root_is_let_in(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in compose(OPEN_5, *job(TWO))
    assert "--allow-run-as-root" not in compose(MPICH, *job(TWO))


@pytest.mark.parametrize("kind", [OPEN_4, MPICH])
def test_ipv6_is_refused_where_the_mpi_does_not_take_it(kind):
    with pytest.raises(UsageError, match="IPv6"):
        compose(kind, *job(JOE))


def test_exported_are_those_that_programs_read():
    given = ("PATH", "TF_X", "TF_CONFIG", "HOME", "COLLECTIVE_RANK", "NCCL_DEBUG")
    assert mpi.exported(dict.fromkeys(given, "x")) == ["NCCL_DEBUG", "PATH", "TF_X"]


needs_mpirun = pytest.mark.skipif(
    not (Path(sys.executable).parent / "mpirun").exists()
    and shutil.which("mpirun") is None,
    reason="no mpirun",
)
LAUNCH = [sys.executable, "-m", "collective.launch", "--mpi"]
PLACE = "import os; print('place', *(os.environ['OMPI_COMM_WORLD_' + n] for n in ('RANK', 'LOCAL_SIZE')), os.environ['COLLECTIVE_STALL_SECONDS'])"  # fmt: skip


def environment():
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        # More ranks than cores are allowed, with any defaults of this Open MPI.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def run(*words):
    return capture(words, cwd=ROOT)


@needs_mpirun
def test_the_printed_line_is_what_runs():
    options = ["--stall-check-warning-time-seconds", "5", "-np", "2"]
    printed = run(*LAUNCH, "--dry-run", *options, sys.executable, "-c", PLACE)
    assert printed.returncode == 0 and "mpirun -np 2" in printed.stdout
    assert not printed.stderr
    if "Open MPI" not in str(mpi.find()):
        pytest.skip("the place is read as Open MPI writes it")
    done = run("bash", "-c", printed.stdout)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == ["[0] place 0 2 5", "[1] place 1 2 5"]


@needs_mpirun
def test_verbose_lists_every_rank_and_no_failure():
    done = run(*LAUNCH, "--verbose", "-np", "2", "true")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} on " in done.stderr
    assert done.stderr.count("ended with exit code 0") == 3  # mpirun, too
    assert "failed" not in done.stderr


def test_ranks_that_do_not_start_end_the_job(tmp_path):
    waits = tmp_path / "mpirun"
    output = "mpirun (Open MPI) 5.0.11"
    waits.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && echo '{output}' || sleep 1000\n"
    )
    waits.chmod(0o755)
    limit = ["--mpirun", str(waits), "--start-timeout", "1"]
    done = run(*LAUNCH, *limit, "-np", "2", "true")
    assert done.returncode == 124
    assert "2 of 2 ranks did not start within 1 s, on localhost" in done.stderr
    assert "HINT: python -m collective.doctor" in done.stderr


FAILS = (
    "import sys, time\n"
    "from collective.environment import detect\n"
    "if detect().rank == 1: raise RuntimeError('of rank', detect().rank)\n"
    "time.sleep(1000)"
)


@needs_mpirun
def test_a_rank_that_fails_has_the_last_word():
    done = run(*LAUNCH, "-np", "2", sys.executable, "-c", FAILS)
    assert done.returncode == 1
    last = done.stderr.splitlines()
    assert "rank 1 of 2 on" in last[-1] and last[-1].endswith(
        "failed: it ended with exit code 1"
    )
    assert last[-2] == "RuntimeError: ('of rank', 1)"
    assert "Traceback (most recent call last):" in last[-8:]


SLEEPS = (
    "import subprocess, sys, time\n"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
    "print('here', flush=True); time.sleep(1000)"
)


@needs_mpirun
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_launcher(number):
    process = subprocess.Popen(
        [*LAUNCH, "-np", "2", sys.executable, "-c", SLEEPS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env=environment(),
    )
    assert process.stdout is not None
    for _ in range(2):
        assert b"here" in process.stdout.readline()
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 6  # at least two ranks, their supervisors, their children
    process.send_signal(number)
    code = process.wait(timeout=PATIENCE_SECONDS)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    process.stdout.close()
    assert not psutil.wait_procs(family, timeout=PATIENCE_SECONDS)[1]
