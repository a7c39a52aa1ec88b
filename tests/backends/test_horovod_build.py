"""Horovod's wheel: its TensorFlow and MPI, its omitted parts, and its place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from collective.backends.horovod import build, installed, run
from collective.backends.horovod.build import Target
from collective.environment import Environment
from collective.errors import CollectiveError

FOUR = Environment("horovodrun", 2, 4, 2, 4)
HERE = Target(("tensorflow-cpu", "2.21.0"), ("Open MPI", "5.0.11"))
OTHERS = [
    Target(("tensorflow-cpu", "2.20.0"), ("Open MPI", "5.0.11")),
    Target(("tensorflow", "2.21.0"), ("Open MPI", "5.0.11")),
    Target(("tensorflow-cpu", "2.21.0"), ("Open MPI", "5.0.1")),
    Target(("tensorflow-cpu", "2.21.0"), ("MPICH", "5.0.11")),
    Target(("tensorflow-cpu", "2.21.0"), None),
    Target(HERE.tensorflow, HERE.mpi, (("HOROVOD_GPU_OPERATIONS", "NCCL"),)),
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def keep(wanted: Target):
    build.cache().mkdir(parents=True, exist_ok=True)
    built = build.cache() / f"horovod-{wanted.version}-cp311-cp311-any.whl"
    built.touch()
    return built


def test_a_build_for_another_target_is_never_picked_up():
    wheels = [keep(other) for other in OTHERS]
    assert len(set(wheels)) == len(OTHERS)
    assert build.kept(HERE) is None
    mine = keep(HERE)
    assert build.kept(HERE) == mine
    assert [build.kept(other) for other in OTHERS] == wheels


def test_the_version_is_one_that_pip_takes():
    packaging = pytest.importorskip("packaging.version")
    for wanted in (HERE, *OTHERS):
        version = packaging.Version(wanted.version)
        assert str(version) == wanted.version and version.public == "0.28.1"


def test_the_target_is_what_is_here(monkeypatch):
    monkeypatch.setattr(installed, "tensorflow", lambda: HERE.tensorflow)
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    found = build.target()
    assert found.tensorflow == HERE.tensorflow
    assert found.settings == (("HOROVOD_GPU_OPERATIONS", "NCCL"),)


def test_one_line_is_left_out_and_no_other(tmp_path):
    lists = tmp_path / "CMakeLists.txt"
    lists.write_text("one(mpi_ops.cc)\ntwo(xla_mpi_ops.cc)\nthree()\n")
    build.leave_out(lists)
    assert lists.read_text() == "one(mpi_ops.cc)\nthree()\n"
    with pytest.raises(CollectiveError, match="HINT: pip download"):
        build.leave_out(lists)


def test_without_a_compiler_it_says_so_and_exits_2(monkeypatch, capsys):
    monkeypatch.setattr(build, "target", lambda: HERE)
    monkeypatch.setattr(installed, "version", lambda: None)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.main() == 2
    printed = capsys.readouterr().err
    assert "there is no c++" in printed and printed.splitlines()[-1].startswith(
        "HINT: apt"
    )


def test_without_a_folder_to_keep_it_in_it_says_so_and_exits_2(
    monkeypatch, capsys, tmp_path
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build, "target", lambda: HERE)
    monkeypatch.setattr(installed, "version", lambda: None)
    monkeypatch.setattr(build.shutil, "which", lambda name: name)
    assert build.main() == 2
    assert "HINT: export XDG_CACHE_HOME=" in capsys.readouterr().err


def test_a_failing_build_exits_1_and_keeps_nothing(monkeypatch, capsys):
    def fails(command, environment, log):
        return int("--wheel-dir" in command)

    monkeypatch.setattr(build, "target", lambda: HERE)
    monkeypatch.setattr(installed, "version", lambda: None)
    monkeypatch.setattr(build, "_logged", fails)
    monkeypatch.setattr(build, "leave_out", lambda lists: None)
    monkeypatch.setattr(build.shutil, "unpack_archive", lambda *_: None)
    assert build.main() == 1
    assert "HINT: less " in capsys.readouterr().err
    assert build.kept(HERE) is None


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Install an empty Horovod, built for a TensorFlow or for none."""

    def install(tensorflow: str | None, suffix: str | None = None) -> str | None:
        site = tmp_path / "site"
        (site / "horovod" / "tensorflow").mkdir(parents=True)
        (site / "horovod" / "__init__.py").touch()
        (site / "horovod-0.28.1.dist-info").mkdir()
        (site / "horovod-0.28.1.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n"
        )
        monkeypatch.syspath_prepend(str(site))
        if tensorflow:
            suffix = suffix or installed.sysconfig.get_config_var("EXT_SUFFIX")
            (site / "horovod" / "tensorflow" / f"mpi_lib{suffix}").touch()
            (site / "horovod" / "metadata.json").write_text(
                f'{{"tensorflow": "{tensorflow}", "dummy": "none"}}'
            )
        return installed.misfit()

    yield install
    for name in [n for n in sys.modules if n.split(".")[0] == "horovod"]:
        del sys.modules[name]


def test_no_horovod_is_reported(monkeypatch):
    from collective.backends.horovod.backend import HorovodBackend

    monkeypatch.setattr(installed, "version", lambda: None)
    found = HorovodBackend.availability(FOUR)
    assert (found.usable, found.hint) == (False, "make horovod")
    assert found.reason == "Horovod is not installed"


def test_a_horovod_without_tensorflow_is_reported(pretend):
    assert pretend(None) == "Horovod is installed, but was built without TensorFlow"


def test_a_horovod_for_another_tensorflow_is_reported(pretend, monkeypatch):
    monkeypatch.setattr(installed, "tensorflow", lambda: HERE.tensorflow)
    mismatch = pretend("2.16.2")
    assert (
        mismatch == "Horovod was built for TensorFlow 2.16.2, and 2.21.0 is installed"
    )


def test_a_horovod_for_another_python_is_reported(pretend):
    assert "another Python (mpi_lib.cpython-39-x.so)" in pretend(
        "2.21.0", ".cpython-39-x.so"
    )


def test_a_horovod_that_fits_needs_a_launcher(pretend, monkeypatch):
    from collective.backends.horovod.backend import HorovodBackend

    monkeypatch.setattr(installed, "tensorflow", lambda: HERE.tensorflow)
    assert pretend("2.21.0") is None
    assert HorovodBackend.availability(FOUR).usable
    for other in (Environment(), Environment("torchrun", 2, 4, 2, 4)):
        found = HorovodBackend.availability(other)
        assert not found.usable and found.hint.startswith("horovodrun -np 4")


def test_only_horovods_own_words_report_another_rank(monkeypatch, capsys):
    """A data set's connection may be reset, too, which is an error of this rank."""
    from collective.backends.horovod import backend

    monkeypatch.setattr(backend, "ENDED_BY_LAUNCHER_SECONDS", 0)
    backend = backend.HorovodBackend.__new__(backend.HorovodBackend)
    backend.rank = 1
    assert backend.ended_by_another(OSError("Connection reset by peer")) is None
    assert capsys.readouterr().err == ""
    lost = RuntimeError("Horovod has been shut down. This was caused by ...")
    assert backend.ended_by_another(lost) == 1
    printed = capsys.readouterr().err
    assert "rank 1: error: another rank" in printed and "HINT: " in printed


def test_our_horovodrun_is_horovods_with_four_things_settled(tmp_path):
    """It runs in a program of its own with a fake launcher that reports its arguments."""
    launcher = tmp_path / "horovod" / "runner"
    launcher.mkdir(parents=True)
    for folder in (launcher, launcher.parent):
        (folder / "__init__.py").touch()
    (launcher / "launch.py").write_text(
        "import os, sys\n"
        "def run_commandline():\n"
        "    print(sys.argv[1:], os.environ['COLLECTIVE_HOROVODRUN'])\n"
        "    if '7' in sys.argv:\n"
        "        raise RuntimeError('so it ended\\nExit code: 7\\n')\n"
    )
    run.install(tmp_path)
    for typed, code in (["-np", "4", "python"], 0), (["-np", "7"], 7):
        ended = subprocess.run(
            [tmp_path / "horovodrun", *typed],
            env={"PYTHONPATH": f"{tmp_path}:{build.__file__}/../.."},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == code, ended.stderr
        assert ended.stdout == f"{[run.BINDING, *typed]} 1\n"
        assert "Traceback" not in ended.stderr
        assert ("so it ended" in ended.stderr) == bool(code)
