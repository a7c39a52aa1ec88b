"""One name in site-packages; a user's own folders with our names stay the user's."""

from __future__ import annotations

import email.message
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools

from collective import installation, namesake
from collective.errors import UsageError
from collective.log import log
from tests import checkout, launch

# A user's folders and files with names of this checkout.
OWN = {
    "training/__init__.py": "OWNER = 'the user'\n",
    "backends/__init__.py": "OWNER = 'the user'\n",
    "comparison/__init__.py": "OWNER = 'the user'\n",
    "tests/__init__.py": "OWNER = 'the user'\n",
    "train.py": "OWNER = 'the user'\n",
    "compare.py": "OWNER = 'the user'\n",
    "utils.py": "OWNER = 'the user'\n",
    "script.py": """
import os

import backends, compare, comparison, tests, train, training, utils
import keras
import numpy as np

import collective

for module in (backends, compare, comparison, tests, train, training, utils):
    assert module.OWNER == "the user", module
assert collective.training.__name__ == "collective.training"
rng = np.random.default_rng(1)
x = rng.normal(size=(64, 3)).astype("float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
result = collective.fit(model, x, x[:, :1], backend="single", epochs=2, verbose=0)
losses = result.history["loss"]
assert losses[-1] < losses[0], losses
print("trained with", os.path.dirname(collective.__file__))
""",
}


def run_script(folder: Path, **variables: str) -> str:
    """Run the user's script in the user's folder; return its last line."""
    for name, text in OWN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    env = {k: v for k, v in launch.environment().items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1].removeprefix("trained with ")


URL = "https://example.org/owner/name"  # where the project might be published


def build_wheel(folder: Path, core: bool) -> Path:
    """Build a wheel; with ``core``, CMake also builds the native core."""
    # From a copy, because setuptools takes all that an earlier build left in build/.
    checkout.copy(folder / "copy")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--wheel-dir", str(folder), str(folder / "copy")]
    if not core:
        command.append("--no-build-isolation")
    env = os.environ | {"COLLECTIVE_BUILD_CORE": str(int(core)), "REPOSITORY_URL": URL}
    subprocess.run(command, env=env, check=True, timeout=2400)
    (wheel,) = folder.glob("keras_collective-*.whl")
    return wheel


def check_links(metadata: Path) -> None:
    """Checks that the page on PyPI leads somewhere: to this version, and to real files."""
    text = metadata.read_text()
    assert f"Project-URL: Source, {URL}\n" in text
    (version,) = re.findall(r"^Version: (.*)$", text, re.M)
    links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'="(\S+?)"', text)]
    links = [link for link in links if not link.startswith("#")]
    assert len(links) > 25 and [link for link in links if "://" not in link] == []
    ours = re.compile(rf"{re.escape(URL)}/(?:blob|raw)/v{re.escape(version)}/([^#]+)")
    files = [match[1] for match in map(ours.match, links) if match]
    assert len(files) > 25 and all((launch.ROOT / file).exists() for file in files)


@pytest.mark.launches
def test_a_source_distribution_has_what_a_checkout_has(tmp_path):
    """Its Makefile, tests and pages name these files."""
    copy, folder = tmp_path / "copy", tmp_path / "dist"
    checkout.copy(copy)
    command = [
        sys.executable,
        "setup.py",
        "--quiet",
        "sdist",
        "--dist-dir",
        str(folder),
    ]
    subprocess.run(command, cwd=copy, check=True, timeout=300)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        members = {m.name.partition("/")[2]: m for m in opened.getmembers()}
    wanted = {
        str(path.relative_to(copy))
        for path in copy.rglob("*")
        if (path.is_symlink() or path.is_file()) and path.suffix != ".pyc"
    }
    wanted = {
        name for name in wanted if not name.startswith("keras_collective.egg-info")
    }
    assert wanted - set(members) == set()
    assert members["collective/backends"].linkname == "../backends"
    assert members[".ci/quietly"].mode & 0o100


@pytest.mark.launches
def test_a_users_folders_of_our_names_stay_theirs(tmp_path):
    """This holds in the environment of the tests, in which the package is editable."""
    editable = subprocess.run(
        [sys.executable, "-c", "import collective"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
    )
    if editable.returncode:
        pytest.skip("collective is not installed in this environment")
    run_script(tmp_path)


@pytest.mark.launches
@pytest.mark.parametrize(
    "core", [False, pytest.param(True, marks=pytest.mark.builds)], ids=["", "core"]
)
def test_a_wheel_holds_one_package(tmp_path, core):
    if not core and int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("pyproject.toml needs setuptools 77")
    with zipfile.ZipFile(build_wheel(tmp_path, core)) as wheel:
        names = wheel.namelist()
        wheel.extractall(tmp_path / "installed")
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2 and "collective" in tops, tops
    (info,) = tops - {"collective"}
    assert info.startswith("keras_collective-") and info.endswith(".dist-info")
    check_links(tmp_path / "installed" / info / "METADATA")
    for folder in ("training", "backends", "comparison"):
        assert f"collective/{folder}/__init__.py" in names
    assert ("collective/native/libcollective.so" in names) == core
    user = tmp_path / "user"
    used = run_script(user, PYTHONPATH=str(tmp_path / "installed"))
    assert used == str(tmp_path / "installed" / "collective")


@pytest.mark.launches
def test_import_brings_no_tensorflow():
    code = (
        "import sys, collective\n"
        "heavy = {'tensorflow', 'keras', 'mpi4py.MPI', 'numpy', 'cloudpickle'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=launch.environment(), capture_output=True)
    assert done.stdout.decode() == "[]\n", done.stderr.decode()


@pytest.mark.parametrize("url", [URL, ""])
def test_hints_of_a_wheel_name_published_pages(url, monkeypatch):
    about = email.message.Message()
    about["Version"] = "1.2.3"
    if url:
        about["Project-URL"] = f"Source, {url}"
    monkeypatch.setattr(installation.metadata, "metadata", lambda _: about)
    hint = "see docs/how-to/slurm.md#srun"
    assert str(UsageError("no", hint=hint)).endswith(hint)  # in a checkout
    monkeypatch.setattr(installation, "CHECKOUT", False)
    installation._published.cache_clear()
    published = f"{url}/blob/v1.2.3/docs" if url else "docs"
    wanted = f"HINT: see {published}/how-to/slurm.md#srun"
    assert str(UsageError("no", hint=hint)).endswith(wanted)
    installation._published.cache_clear()


def test_a_package_of_the_same_name_is_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(log, "propagate", True)
    tmp_path.joinpath("keras_collective-0.1.0.dist-info").mkdir()
    namesake.warn_of_namesake(tmp_path)
    assert not caplog.messages
    tmp_path.joinpath("collective-1.4.dist-info").mkdir()
    namesake.warn_of_namesake(tmp_path)
    assert "named collective (1.4)" in caplog.text and "HINT: pip" in caplog.text
