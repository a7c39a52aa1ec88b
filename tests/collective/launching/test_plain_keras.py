"""What the launcher says of a script that knows nothing of ranks."""

from __future__ import annotations

import sys

import pytest

from collective.errors import UsageError
from collective.launch import command_line, plain_keras

PLAIN = "import keras\nfrom helper import make\nmake().fit(x, y)\n"
START = "collectiverun -np 2"


def write(folder, script=PLAIN, helper="import keras\n"):
    (folder / "helper.py").write_text(helper)
    path = folder / "mine.py"
    path.write_text(script)
    return str(path)


def test_a_plain_keras_script_is_named(tmp_path):
    path = write(tmp_path)
    text = plain_keras.warning([sys.executable, path], 2, START)
    assert f"HINT: {START} --keras {path}" in text and "each of the 2 ranks" in text
    assert not plain_keras.warning([sys.executable, path], 1, START)
    assert not plain_keras.warning(["hostname"], 2, START)


@pytest.mark.parametrize(
    "parts",
    [
        {"script": PLAIN + "import horovod.tensorflow.keras as hvd\n"},
        {"helper": "from mpi4py import MPI\n"},
        {"helper": "import tensorflow as tf\ntf.distribute.MirroredStrategy()\n"},
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
    (tmp_path / "mine.py").chmod(0o755)  # with its interpreter in the first line
    assert command_line.parse(["-np", "2", path]).command == [path]
