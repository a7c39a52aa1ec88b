"""The defaults for mpirun: written once, and only for this environment's Open MPI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collective import mpi_defaults
from collective.mpi_defaults import AS_ROOT, MARK, OVERSUBSCRIBE, write_defaults


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Make a virtual environment with an Open MPI 5, as its wheel installs it."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "etc" / "prte-mca-params.conf").write_text("# a comment\n")
    (tmp_path / "bin" / "activate").write_text("export VIRTUAL_ENV=here\n")
    return tmp_path


def texts(prefix: Path) -> tuple[str, str]:
    return (
        (prefix / "etc" / "prte-mca-params.conf").read_text(),
        (prefix / "bin" / "activate").read_text(),
    )


@pytest.mark.parametrize("user", [0, 1000])
def test_writes_the_defaults_once(prefix, monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert write_defaults(prefix)
    parameters, activate = texts(prefix)
    assert parameters == f"# a comment\n\n{MARK}\n{OVERSUBSCRIBE}\n"
    # Open MPI refuses root for a reason, so this is set only if root runs it.
    wanted = f"\n{MARK}\n{AS_ROOT}\n" if user == 0 else ""
    assert activate == f"export VIRTUAL_ENV=here\n{wanted}"
    assert write_defaults(prefix)
    assert texts(prefix) == (parameters, activate)


def test_what_the_user_has_set_stays(prefix):
    file = prefix / "etc" / "prte-mca-params.conf"
    file.write_text("hwloc_default_binding_policy = none\n")
    assert write_defaults(prefix)
    assert file.read_text().startswith("hwloc_default_binding_policy = none\n")


def test_an_mpi_of_the_system_is_left_alone(prefix, monkeypatch, tmp_path):
    monkeypatch.setattr(mpi_defaults.sys, "base_prefix", str(prefix))
    before = texts(prefix)
    assert not write_defaults(prefix)
    assert texts(prefix) == before


def test_an_environment_without_open_mpi_is_left_alone(prefix):
    (prefix / "etc" / "prte-mca-params.conf").unlink()
    before = (prefix / "bin" / "activate").read_text()
    assert not write_defaults(prefix)
    assert (prefix / "bin" / "activate").read_text() == before
    assert not (prefix / "etc" / "prte-mca-params.conf").exists()


def test_an_environment_without_a_script_to_activate_it(prefix, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (prefix / "bin" / "activate").unlink()
    assert write_defaults(prefix)
    assert not (prefix / "bin" / "activate").exists()


def test_activate_lets_root_start_ranks(prefix, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    write_defaults(prefix)
    printed = subprocess.run(
        ["sh", "-c", f". {prefix}/bin/activate; env"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    ).stdout.splitlines()
    assert "OMPI_ALLOW_RUN_AS_ROOT=1" in printed
    assert "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" in printed


def test_as_a_program_it_says_what_it_did():
    printed = subprocess.run(
        [sys.executable, "-m", "collective.mpi_defaults"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert printed in ("mpirun may start more ranks than cores", "mpirun left as it is")
