"""Builds the package; everything declarative is in pyproject.toml.

CMake builds the native core, and takes options from the variable ``CMAKE_ARGS``.
Without a compiler the build fails, because pip would otherwise keep a wheel without the
core and install it again on a machine with a compiler. ``COLLECTIVE_BUILD_CORE=0``
leaves the core out, and so does any system other than Linux: then ``native`` and the
collectives of ``collective`` are missing.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

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

    def get_source_files(self):
        """Return the files of a source distribution."""
        found = [*ROOT.glob("collective/native/**/*.[ch]*"), *ROOT.glob("cmake/*")]
        return ["CMakeLists.txt", *(str(path.relative_to(ROOT)) for path in found)]


# The address at which the project is published; a release knows it.
URL = os.environ.get("REPOSITORY_URL")
PAGES = {"Source": URL, "Issues": f"{URL}/issues", "Changelog": f"{URL}/releases"}

setup(
    project_urls=PAGES if URL else {},
    ext_modules=[Extension("collective.native.core", sources=[])] if CORE else [],
    cmdclass={"build_ext": BuildWithCMake},
    # The binaries use Python's stable interface, or none of Python: one wheel for all.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
