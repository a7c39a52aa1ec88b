"""Builds the package; everything declarative is in pyproject.toml.

``REPOSITORY_URL`` is where the project is published, for example
``https://github.com/owner/name``. A release sets it; the pages and links of the project on
PyPI are made from it.

CMake builds the native core on the way, and options for it are taken from the variable
``CMAKE_ARGS``. Without a compiler the build fails, as pip would otherwise keep a wheel
without the core and install it again where a compiler is. ``COLLECTIVE_BUILD_CORE=0``
leaves the core out, as does a system other than Linux: ``native`` is missing then, and
``collective``'s collectives.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent.resolve()
CORE = (
    sys.platform.startswith("linux") and os.environ.get("COLLECTIVE_BUILD_CORE") != "0"
)


class BuildWithCMake(build_ext):
    """Runs CMake in place of setuptools' own compiler."""

    def run(self):
        """Build the libraries into the package, or say in one line why that fails."""
        build = Path(self.build_temp).resolve()
        configure = ["-S", ROOT, "-B", build, f"-DCOLLECTIVE_OUTPUT={self._target()}"]
        configure += [f"-DPython3_EXECUTABLE={sys.executable}"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        try:
            subprocess.run(["cmake", *configure], check=True)
            subprocess.run(["cmake", "--build", build, "--parallel"], check=True)
        except (OSError, subprocess.CalledProcessError):
            sys.exit(
                "collective: the C++ core was not built. HINT: install the wheel, which "
                "needs no compiler (keras_collective-VERSION-cp310-abi3-manylinux*.whl); to "
                "build here: apt-get install g++; without it: COLLECTIVE_BUILD_CORE=0"
            )

    def _target(self):
        inplace = self.inplace or getattr(self, "editable_mode", False)
        return (
            ROOT if inplace else Path(self.build_lib).resolve()
        ) / "collective/native"

    def get_outputs(self):
        """Return the files that were built."""
        return [str(path) for path in self._target().glob("*.so")]

    def get_output_mapping(self):
        """Return nothing: built files are in place in an editable install."""
        return {}


class SourceWithLink(sdist):
    """Makes the source distribution the tree that git has."""

    def make_release_tree(self, base_dir, files):
        """Keeps collective/backends a link: copied files would be a second package."""
        super().make_release_tree(base_dir, files)
        link = Path(base_dir, "collective", "backends")
        if (ROOT / "collective" / "backends").is_symlink():
            shutil.rmtree(link)
            link.symlink_to(Path("..", "backends"))


def description(url):
    """Return README.md as PyPI shows it: relative links lead to nothing there.

    Args:
        url: Where the project is published, or None: then links are plain text, and
            pictures are left out.
    """
    text = (ROOT / "README.md").read_text()
    declared = (ROOT / "pyproject.toml").read_text()
    tag = "v" + re.search(r'^version = "(.*)"', declared, re.M)[1]
    relative = r"\((?!https?://|#)([^)\s]+)\)"
    if url is None:
        text = re.sub(r"<details>.*?</details>\n\n", "", text, flags=re.S)
        text = re.sub(rf"!\[[^\]]*\]{relative}", "", text)
        return re.sub(rf"\[([^\]]*)\]{relative}", r"\1", text)
    text = re.sub(rf"(!\[[^\]]*\]){relative}", rf"\1({url}/raw/{tag}/\2)", text)
    return re.sub(rf"(\[[^\]]*\]){relative}", rf"\1({url}/blob/{tag}/\2)", text)


URL = os.environ.get("REPOSITORY_URL") or None
PAGES = {"Source": URL, "Issues": f"{URL}/issues", "Changelog": f"{URL}/releases"}

setup(
    long_description=description(URL),
    long_description_content_type="text/markdown",
    project_urls=PAGES if URL else {},
    ext_modules=[Extension("collective.native.core", sources=[])] if CORE else [],
    cmdclass={"build_ext": BuildWithCMake, "sdist": SourceWithLink},
    # What is built uses Python's stable interface, or none of Python: one wheel for all.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
