"""The launcher's messages about a script that does not use ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from collective.errors import UsageError
from collective.launch import command_line, plain_keras
from collective.launch.__main__ import main
from tests import launch

PLAIN = "import keras\nfrom helper import make\nmake().fit(x, y)\n"
START = "collectiverun -np 2"


def write(folder, script=PLAIN, helper="import keras\n"):
    (folder / "helper.py").write_text(helper)
    path = folder / "mine.py"
    path.write_text(script)
    return str(path)


@pytest.mark.parametrize(
    "script",
    [
        PLAIN,
        "import numpy as np, keras\nkeras.Sequential().fit(x, y)\n",
        '"""Knows of RANK, in words."""\n# the distribution of rows, by collective\n'
        + PLAIN,
        "import tensorflow as tf\nfrom helper import x\ntf.GradientTape()\n",
        PLAIN
        + "tf.distribute.MirroredStrategy()\n",  # each rank trains a model of its own here, too
    ],
)
def test_a_plain_keras_script_is_named(script, tmp_path):
    path = write(tmp_path, script)
    text = plain_keras.warning([sys.executable, path], 2, START)
    assert f"HINT: {START} --keras {path}" in text and "each of the 2 ranks" in text
    assert not plain_keras.warning([sys.executable, path], 1, START)
    assert not plain_keras.warning(["hostname"], 2, START)


@pytest.mark.parametrize(
    "typed, program",
    [
        ("python3 -u mine.py --x", "mine.py"),
        ("python -uW ignore -X dev -B mine.py", "mine.py"),
        ("python -m mine", "python -m mine"),
        ("python -O -m package.part 3", "python -m package.part"),
    ],
)
def test_flags_of_python_and_modules(typed, program, tmp_path, monkeypatch):
    write(tmp_path)
    (tmp_path / "package").mkdir()
    relative = "from . import part\nfrom .helper import x\nmodel.fit(x)\n"
    (tmp_path / "package" / "part.py").write_text(relative)
    (tmp_path / "package" / "helper.py").write_text("import keras\n")
    monkeypatch.chdir(tmp_path)
    assert f"--keras {program};" in plain_keras.warning(typed.split(), 2, START)


@pytest.mark.parametrize(
    "parts",
    [
        {"script": PLAIN + "import horovod.tensorflow.keras as hvd\n"},
        {"helper": "from mpi4py import MPI\n"},
        {"helper": "tf.distribute.MultiWorkerMirroredStrategy()\n"},
        {"helper": "rank = os.environ['OMPI_COMM_WORLD_RANK']\n"},
        {"script": "print(1)\n"},
        {"script": "import keras\nkeras.Sequential().predict(x)\n"},
        {"script": "no python"},
    ],
)
def test_others_are_not(parts, tmp_path):
    path = write(tmp_path, **parts)
    assert not plain_keras.warning([sys.executable, path], 2, START)


def test_a_script_in_the_place_of_a_program(tmp_path):
    path = write(tmp_path)
    with pytest.raises(UsageError, match="is a script") as caught:
        command_line.parse(["-np", "2", path])
    assert f"{START} --keras {path}" in caught.value.hint
    assert f"{START} python {path}" in caught.value.hint
    (tmp_path / "mine.py").chmod(0o755)  # its first line names the interpreter
    assert command_line.parse(["-np", "2", path]).command == [path]


@pytest.mark.parametrize(
    "typed, said",
    [
        ("--keras mine.py --backend mpi x", "--keras --backend mpi mine.py"),
        ("--keras mine.py --loops --epochs 3", "--keras --loops mine.py"),
        ("--keras python -u mine.py --set=a=1", "--keras --set=a=1 mine.py"),
        ("python mine.py --keras", "--keras mine.py"),
        ("python -m mine x -np 3", "-np 3 python -m mine"),
        ("python mine.py --backend mpi", ""),  # the script may have this option
        ("--keras --backend mpi mine.py --epochs 3", ""),
    ],
)
@pytest.mark.parametrize("takes", [False, True])
def test_options_behind_the_script(typed, said, takes, tmp_path, monkeypatch, capsys):
    asks = (
        "add('--backend'); add('--loops'); add('--set'); add('--keras'); add('-np')\n"
    )
    write(tmp_path, asks if takes else PLAIN)
    monkeypatch.chdir(tmp_path)
    command_line.parse(["-np", "2", *typed.split()])
    printed = capsys.readouterr().err
    wanted = "" if takes or not said else f"\nHINT: {START} {said}\n"
    assert wanted in printed and bool(wanted) == bool(printed)


@pytest.mark.parametrize(
    "typed, message, hint",
    [
        ("--backend natve", "unknown backend 'natve'", "did you mean native?"),
        ("--set accumulat=4", "no option 'accumulat'", "did you mean accumulate?"),
        ("--set accumulate=four", "not a value of Python", "--set accumulate=4"),
        (
            "--backend tf-mirrored",
            "2 processes were started",
            "python -m collective.distribute --backend tf-mirrored --devices 2 mine.py",
        ),
        (
            "--backend tf-one-device",
            "2 processes were started",
            "python -m collective.distribute --backend tf-one-device mine.py",
        ),
        (
            "--backend tf-parameter-server",
            "an unedited script does not work with backend 'tf-parameter-server'",
            "collectiverun -np 2 --keras mine.py; or",
        ),
    ],
)
def test_mistakes_are_named_before_ranks_start(
    typed, message, hint, tmp_path, monkeypatch, capsys
):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["-np", "2", "--keras", *typed.split(), "mine.py"]) == 2
    printed = capsys.readouterr().err
    assert message in printed and f"HINT: {hint}" in printed


@pytest.mark.parametrize("by_file", [False, True])
def test_another_backend_of_keras_is_refused(by_file, tmp_path, monkeypatch):
    environment = {**os.environ, "KERAS_HOME": str(tmp_path)}
    environment.pop("KERAS_BACKEND", None)
    if by_file:
        (tmp_path / "keras.json").write_text(json.dumps({"backend": "jax"}))
    else:
        environment["KERAS_BACKEND"] = "jax"
    start = "from collective.launch.__main__ import main; exit(main(['-np', '2', "
    for code in ("import collective; collective.fit", start + "'--keras', 'x.py']))"):
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert "Keras' backend is 'jax', by " in ended.stderr and ended.returncode
        assert ended.stderr.endswith("HINT: KERAS_BACKEND=tensorflow\n")


@pytest.mark.launches
def test_ranks_that_never_met_are_named_at_the_end(tmp_path, capfd):
    script = write(tmp_path, "import helper\n", "")
    assert main(["-np", "2", sys.executable, script]) == 0
    printed = capfd.readouterr().err
    assert "none of the 2 ranks joined" in printed
    assert f"{START} --keras {script};" in printed
    write(tmp_path, "import collective; collective.init()\n")
    environment = launch.environment()
    ended = subprocess.run(
        [*launch.command("native", 2), sys.executable, script],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
