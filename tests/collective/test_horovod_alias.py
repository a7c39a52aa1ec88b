"""``import horovod`` means this package if the alias is installed, and reports that."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest

from collective import horovod_alias
from collective.errors import UsageError
from tests import launch

USES = """
import horovod, horovod.keras, horovod.runner.common.util.env
import horovod.tensorflow.keras.callbacks as callbacks
import collective.keras, collective.tensorflow.keras as ours
assert horovod.tensorflow.keras is ours and callbacks is ours.callbacks
assert ours.__spec__.name == ours.__name__ == "collective.tensorflow.keras"
assert horovod.keras is collective.keras and horovod.run is collective.run
try:
    import horovod.torch
except ModuleNotFoundError as error:
    print(horovod.__version__, error)
"""


@pytest.mark.launches
def test_the_package_is_this_one(tmp_path):
    with zipfile.ZipFile(horovod_alias._make_wheel(tmp_path)) as wheel:
        wheel.extractall(tmp_path / "site")
    environment = launch.environment()
    environment["PYTHONPATH"] = f"{tmp_path / 'site'}:{environment['PYTHONPATH']}"
    command = [sys.executable, "-c", USES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0.28.1 no module named 'horovod.torch'")


def test_the_real_horovod_stays(monkeypatch):
    versions = {"horovod": "0.28.1+local"}
    monkeypatch.setattr(horovod_alias, "_version", versions.get)
    monkeypatch.setattr(horovod_alias, "_pip", lambda *_: pytest.fail("changed"))
    assert horovod_alias.status() == "import horovod is Horovod 0.28.1+local"
    with pytest.raises(UsageError, match="is installed, and stays"):
        horovod_alias.install()
    versions.clear()
    assert horovod_alias.remove() == "there is no horovod to import"


def test_a_wheel_names_its_files_and_their_digests(tmp_path):
    with zipfile.ZipFile(horovod_alias._make_wheel(tmp_path)) as wheel:
        names = wheel.namelist()
        (record,) = (name for name in names if name.endswith("/RECORD"))
        listed = wheel.read(record).decode().splitlines()
    assert [line.split(",")[0] for line in listed] == names
    assert all(",sha256=" in line for line in listed[:-1])
