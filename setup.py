"""Builds the package; everything declarative is in pyproject.toml.

The native core is built by CMake on the way. Where that fails, as without a C++
compiler, installation continues: all but the ``native`` backend and ``collective``'s
collectives work without it.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
LIBRARIES = (
    "libcollective.so",
    "libcollective_tensorflow.so",
    "collective_python.abi3.so",
)


class BuildWithCMake(build_ext):
    """Runs CMake in place of setuptools' own compiler."""

    def run(self):
        """Builds the libraries into the package, or says why it cannot."""
        if os.environ.get("COLLECTIVE_BUILD_CORE") == "0":
            return  # make core does it
        if not sys.platform.startswith("linux"):
            self._report("it needs Linux", "on other systems: --backend tf-mirrored")
            return
        build = Path(self.build_temp).resolve()
        configure = ["-S", ROOT, "-B", build, f"-DCOLLECTIVE_OUTPUT={self._target()}"]
        configure += [f"-DPython3_EXECUTABLE={sys.executable}"]
        try:
            subprocess.run(["cmake", *configure], check=True)
            subprocess.run(["cmake", "--build", build, "--parallel"], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            self._report(
                str(error),
                "install a C++17 compiler (apt install g++) and repeat: pip install -e .",
            )

    def _target(self):
        inplace = self.inplace or getattr(self, "editable_mode", False)
        return (
            ROOT if inplace else Path(self.build_lib).resolve()
        ) / "collective/native"

    def _report(self, why, hint):
        print(
            f"collective: the native core is not built: {why}\nHINT: {hint}",
            file=sys.stderr,
            flush=True,
        )

    def get_outputs(self):
        """What was built; nothing where it could not be."""
        return [str(p) for p in (self._target() / n for n in LIBRARIES) if p.exists()]

    def get_output_mapping(self):
        """Built files are never copied: in an editable install they are in place."""
        return {}

    def get_source_files(self):
        """What goes into a source distribution."""
        found = [*ROOT.glob("collective/native/**/*.[ch]*"), *ROOT.glob("cmake/*")]
        return ["CMakeLists.txt", *(str(path.relative_to(ROOT)) for path in found)]


setup(
    ext_modules=[Extension("collective.native.core", sources=[])],
    cmdclass={"build_ext": BuildWithCMake},
)
