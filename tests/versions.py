"""Tests with the oldest and the newest TensorFlow and Python that are available here.

    python -m tests.versions            # make test-versions
    python -m tests.versions oldest
    python -m tests.versions keras-nightly    # make test-keras-nightly

It makes an environment for each in build/versions/ and runs in it, on this checkout and its
native core: the drop-in for Horovod, and the equivalence of ``native`` and ``mpi`` with one
process. It reports versions that cannot run; only failing tests make the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import checkout, launch

DROP_IN = [
    f"tests/collective/test_horovod_{n}.py" for n in ("ops", "gradients", "keras")
]
EQUIVALENCE = "tests/training/test_equivalence.py"


@dataclass(frozen=True)
class Version:
    """Versions to try.

    Attributes:
        name: Its name on the command line.
        pythons: Versions of Python, of which the first that has a TensorFlow is taken.
        tensorflow: The requirement for pip.
        keras: The requirement that replaces TensorFlow's own Keras. Such a version runs
            only if it is named.
    """

    name: str
    pythons: Sequence[str]
    tensorflow: str
    keras: str = ""


VERSIONS = (
    Version("oldest", ("3.10", "3.11", "3.12"), "tensorflow-cpu==2.16.*"),
    Version("newest", ("3.14", "3.13", "3.12", "3.11", "3.10"), "tensorflow-cpu>=2.16"),
    Version(
        "keras-nightly",
        ("3.13", "3.12", "3.11"),
        "tensorflow-cpu>=2.16",
        keras="keras-nightly",
    ),
)


def interpreters(version: str) -> Iterator[Path]:
    """Yield places where a Python of that version may be."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        # A Python of an environment would share its packages with a new one.
        if not Path(folder).parent.joinpath("pyvenv.cfg").exists():
            yield Path(folder) / f"python{version}"


def environment(version: Version) -> Path | None:
    """Return the Python of an environment with those versions; None if impossible."""
    for number in version.pythons:
        python = next((p for p in interpreters(number) if works(p)), None)
        if python is None:
            print(f"{version.name}: there is no Python {number} here", flush=True)
            continue
        folder = launch.ROOT / "build" / "versions" / f"{version.name}-{number}"
        made = folder / "bin" / "python"
        if (folder / "ready").exists():
            return made
        subprocess.run([str(python), "-m", "venv", "--clear", str(folder)], check=True)
        with tempfile.TemporaryDirectory() as copy:
            checkout.copy(Path(copy))
            what = [version.tensorflow, f"{copy}[mpi,data,test]"]
            done = pip(made, "install", "--only-binary=:all:", *what)
        if done.returncode == 0 and version.keras:
            pip(made, "uninstall", "--yes", "keras")
            done = pip(made, "install", "--pre", "--no-deps", version.keras)
        if done.returncode == 0:
            (folder / "ready").touch()
            return made
        why = done.stderr.strip().splitlines()
        print(f"{version.name}: no {version.tensorflow} on Python {number}: {why[-1:]}")
    return None


def pip(python: Path, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run pip in an environment."""
    return subprocess.run(
        [str(python), "-m", "pip", command, "--quiet", *words],
        env=os.environ | {"COLLECTIVE_BUILD_CORE": "0"},
        capture_output=True,
        text=True,
    )


def works(python: Path) -> bool:
    """Return whether this interpreter exists and works."""
    if not python.exists():
        return False
    done = subprocess.run([str(python), "-c", "import venv, ssl"], capture_output=True)
    return done.returncode == 0


def run(name: str, python: Path) -> bool:
    """Run the tests in an environment; return whether they passed."""
    env = launch.environment()
    env["PATH"] = os.pathsep.join([str(python.parent), env["PATH"]])
    show = (
        "import sys, tensorflow, keras, numpy; print(*sys.version_info[:3], sep='.', "
        "end=''); print(f', TensorFlow {tensorflow.__version__}, Keras "
        "{keras.__version__}, NumPy {numpy.__version__}')"
    )
    shown = subprocess.run(
        [python, "-c", show], env=env, capture_output=True, text=True
    )
    print(f"{name}: Python {shown.stdout.strip()}", flush=True)
    pytest = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    ranks = [str(python), "-m", "collective.launch", "-np", "2"]
    equivalence = [EQUIVALENCE, "-k", "on_two_ranks_in_float64 and (native or mpi)"]
    passed = True
    for what, command in {
        "the drop-in, one process": [*pytest, *DROP_IN],
        "the drop-in, two ranks": [*ranks, *pytest, *DROP_IN],
        "equivalence of native and mpi": [*pytest, *equivalence],
    }.items():
        code, printed = launch.run(command, env, 1200)
        passed = passed and code == 0
        ended = "passed" if code == 0 else f"FAILED ({code})\n{printed[-6000:]}"
        print(f"{name}: {what}: {ended}", flush=True)
    return passed


def main() -> int:
    """Run the requested versions; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions")
    every = ", ".join(version.name for version in VERSIONS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=every)
    released = [version.name for version in VERSIONS if not version.keras]
    chosen = parser.parse_args().names or released
    failed = []
    for version in VERSIONS:
        if version.name in chosen:
            python = environment(version)
            if python is None:
                print(f"{version.name}: NOT RUN", flush=True)
            elif not run(version.name, python):
                failed.append(version.name)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
