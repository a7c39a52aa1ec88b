"""Help in 80 columns, under the name as typed; for an unknown option the nearest one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from collective import command_parser, requirements
from collective.distribute import command as distribute
from collective.errors import UsageError
from tests import launch

# Modules with a function that makes a parser, or prints the help.
PROGRAMS = {
    "train.py": "collective.train",
    "compare.py": "collective.compare",
    "python -m collective.launch": "collective.launch.command_line",
    "python -m collective.doctor": "collective.doctor.__main__",
    "python -m collective.distribute": "collective.distribute.command",
}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("prog", PROGRAMS)
def test_help_has_80_columns(prog):
    text = importlib.import_module(PROGRAMS[prog]).parser().format_help()
    assert text.startswith(f"usage: {prog} ")
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_help_of_the_benchmark(capsys):
    from collective.bench.__main__ import _parse

    with pytest.raises(SystemExit):
        _parse(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("typed", ["collectiverun", "horovodrun"])
def test_help_has_the_name_that_was_typed(typed, monkeypatch):
    from collective.launch.command_line import parser

    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{typed}", "--help"])
    assert parser().format_help().startswith(f"usage: {typed} [options] command")


@pytest.mark.parametrize(
    "prog, words, hint",
    [
        (
            "python -m collective.launch",
            ["--min-pn", "2", "x"],
            "did you mean --min-np?",
        ),
        ("train.py", ["--epoch-s=3"], "did you mean --epochs? python train.py --help"),
        ("train.py", ["--zzz"], "python train.py --help\n"),
    ],
)
def test_an_unknown_option_has_its_nearest_one(prog, words, hint, capsys):
    with pytest.raises(SystemExit) as got:
        importlib.import_module(PROGRAMS[prog]).parser().parse_args(words)
    assert got.value.code == 2
    assert f"HINT: {hint}" in capsys.readouterr().err


def test_an_error_with_a_hint_keeps_it(capsys):
    with pytest.raises(SystemExit):
        command_parser.Parser("x").error("--a 0\nHINT: --a 1")
    assert capsys.readouterr().err == "error: --a 0\nHINT: --a 1\n"


@pytest.mark.parametrize("missing", ["tensorflow", "keras"])
@pytest.mark.parametrize(
    "words", [["train.py", "--steps", "1"], ["-m", "collective.distribute", "x.py"]]
)
def test_what_is_not_installed_is_named(missing, words, tmp_path):
    (tmp_path / "x.py").touch()
    module = tmp_path / missing / "__init__.py"
    module.parent.mkdir()
    module.write_text(f"raise ModuleNotFoundError(name={missing!r})")
    words = [str(launch.ROOT / w) if w == "train.py" else w for w in words]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{launch.ROOT}"},
        capture_output=True,
        text=True,
    )
    name = {"tensorflow": "TensorFlow", "keras": "Keras"}[missing]
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {name} is not installed\nHINT: pip install")


def test_no_room_for_tensorflow_has_a_hint():
    """As under ``ulimit -v``; the words are the dynamic linker's."""
    words = "libtf.so.2: failed to map segment from shared object"
    with pytest.raises(UsageError) as refused, requirements.explain_missing():
        raise ImportError(words)
    assert words in str(refused.value)
    assert refused.value.exit_code == 1 and "ulimit -v" in refused.value.hint
    other = pytest.raises(ImportError, match="undefined symbol")
    with other, requirements.explain_missing():
        raise ImportError("undefined symbol: x")


@pytest.mark.parametrize("ends", [False, True])
def test_an_error_of_one_rank_is_printed_by_it(ends, monkeypatch, capsys):
    """Every rank may have it; so only rank 0 prints it, unless rank 0 is fine."""
    monkeypatch.setattr(distribute, "_ends_with_rank_zero", lambda rank: ends)
    monkeypatch.setenv("COLLECTIVE_RANK", "1")
    monkeypatch.setenv("COLLECTIVE_SIZE", "2")
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # else it begins anew with one
    assert distribute.main(["no_such_script.py"]) == 2
    assert ("cannot read the script" in capsys.readouterr().err) is not ends
