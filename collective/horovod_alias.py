"""Makes ``import horovod`` mean this package, for programs and libraries that are not edited.

    python -m collective.horovod_alias install | remove | status

``install`` puts a distribution ``keras-collective-horovod`` into this environment: a
package ``horovod`` whose modules are those of ``collective`` (``horovod.tensorflow`` is
``collective.tensorflow``, the same object), and a command ``horovodrun``. If the real
Horovod is installed, nothing is changed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from collective.errors import CollectiveError, UsageError, exit_code

NAME = "keras-collective-horovod"
#: The version of Horovod that has this interface.
VERSION = "0.28.1"
_INSIDE = ("common", "keras", "ray", "runner", "spark", "tensorflow")
_PACKAGE = f'''"""Horovod's import names for the package collective: {NAME}."""

from collective import run
from collective.horovod_alias import install_finder

__version__ = "{VERSION}"
install_finder()
'''


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module ``horovod.x`` as the module ``x`` of this package, loaded only once."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        first, _, rest = fullname.partition(".")
        if first != "horovod" or not rest:
            return None
        if rest.split(".")[0] not in _INSIDE:
            known = ", ".join(f"horovod.{name}" for name in _INSIDE)
            raise ModuleNotFoundError(
                f"no module named {fullname!r}: here {NAME} stands for Horovod, and has "
                f"{known}",
                name=fullname,
            )
        found = importlib.util.find_spec(f"collective.{rest}")
        if found is None:
            return None
        packages = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=packages)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        rest = spec.name.partition(".")[2]
        module = importlib.import_module(f"collective.{rest}")
        self._own = {name: getattr(module, name, None) for name in _OF_IMPORT}
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the attributes that the import system has just overwritten."""
        for name, value in self._own.items():
            setattr(module, name, value)


_OF_IMPORT = ("__spec__", "__loader__", "__package__", "__path__")


def install_finder() -> None:
    """Install the finder; the package ``horovod`` calls this when it is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def status() -> str:
    """Say in a sentence what ``import horovod`` means in this environment."""
    if _version(NAME):
        return f"import horovod is collective ({NAME} is installed)"
    if version := _version("horovod"):
        return f"import horovod is Horovod {version}"
    return "there is no horovod to import"


def install() -> str:
    """Install the package ``horovod``; return what ``import horovod`` means now.

    Raises:
        UsageError: The real Horovod is installed.
        CollectiveError: pip failed.
    """
    if version := _version("horovod"):
        raise UsageError(
            f"Horovod {version} is installed, and stays what import horovod means",
            hint="pip uninstall horovod, or import collective.tensorflow as hvd",
        )
    with tempfile.TemporaryDirectory() as folder:
        wheel = _make_wheel(Path(folder))
        _pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    return status()


def remove() -> str:
    """Remove the package that ``install`` has installed; return the new status."""
    if _version(NAME):
        _pip("uninstall", "--yes", NAME)
    return status()


def _version(distribution: str) -> str | None:
    importlib.invalidate_caches()
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise CollectiveError(
            f"pip failed: {(done.stderr or done.stdout).strip()}",
            hint="python -m ensurepip, if pip is missing",
        )


def _make_wheel(folder: Path) -> Path:
    """Make a wheel, by the specification of the binary distribution format."""
    info = f"{NAME.replace('-', '_')}-{VERSION}.dist-info"
    files = {
        "horovod/__init__.py": _PACKAGE,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
        "Summary: Horovod's import names for keras-collective\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: collective\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\n"
        "horovodrun = collective.launch.__main__:main\n",
    }
    record = [f"{name},{_digest(text)},{len(text)}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    path = folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return path


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser("python -m collective.horovod_alias")
    actions = {"install": install, "remove": remove, "status": status}
    parser.add_argument("action", choices=actions)
    action = actions[parser.parse_args(arguments).action]

    def run() -> int:
        print(action())
        return 0

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
