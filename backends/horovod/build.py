"""Builds Horovod into this environment: ``python -m collective.backends.horovod.build``.

Horovod is distributed as source only, and its build takes minutes, so its wheel is kept
and reused by the next environment that it fits. A build fits one TensorFlow, one MPI
and one Python: the wheel has the first two in its version and the third in its folder,
so no other build is ever installed.

One file is left out of the build for TensorFlow 2.19 and newer, for which it does not
compile. It only serves all-reduce inside functions compiled by XLA.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collective.backends.horovod import installed, run
from collective.errors import CollectiveError, UsageError
from collective.net import private_files

VERSION = "0.28.1"
# Horovod's own build variables, which a user may set: HOROVOD_GPU_OPERATIONS=NCCL.
SETTINGS = "HOROVOD_(WITH|GPU|NCCL|CUDA|ROCM|DDL|CCL|CPU_OP|BUILD|DEBUG|MPICXX)"
# Horovod's setup.py imports these; setuptools 81 has no pkg_resources any more.
TOOLS = ("setuptools<81", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml")
# The file that does not compile, and the TensorFlow that moved one of its headers.
LEFT_OUT, LEFT_OUT_SINCE = "xla_mpi_ops.cc", (2, 19)
CHOSEN = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
}
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@dataclass(frozen=True)
class Target:
    """The target of a build, as names and versions."""

    tensorflow: tuple[str, str]  # the installed distribution
    mpi: tuple[str, str] | None  # the MPI of ``mpicxx``
    settings: tuple[tuple[str, str], ...] = ()  # build variables that the user has set

    @property
    def version(self) -> str:
        """Horovod's version with the target in the local part, as pip spells it."""
        parts = [*self.tensorflow, *(self.mpi or ("no", "mpi"))]
        if self.settings:
            parts.append(hashlib.sha256(repr(self.settings).encode()).hexdigest()[:8])
        return f"{VERSION}+{re.sub('[^a-z0-9]+', '.', '.'.join(parts).lower())}"

    def __str__(self) -> str:
        mpi = " ".join(self.mpi) if self.mpi else "no MPI"
        return f"Horovod {VERSION} for {' '.join(self.tensorflow)} and {mpi}"


def target() -> Target:
    """Return the target of a build in this environment."""
    tensorflow = installed.tensorflow()
    if tensorflow is None:
        raise UsageError(
            "Horovod is built for a TensorFlow, and there is none",
            hint="pip install tensorflow-cpu",
        )
    settings = (item for item in os.environ.items() if re.match(SETTINGS, item[0]))
    mpi = None if os.environ.get("HOROVOD_WITHOUT_MPI") == "1" else _mpi()
    return Target(tensorflow, mpi, tuple(sorted(settings)))


def search_path() -> str:
    """Return PATH with this environment's programs first, activated or not."""
    scripts = sysconfig.get_path("scripts")
    return os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])


def _mpi() -> tuple[str, str] | None:
    for option in ("--showme:version", "-v"):  # Open MPI's, MPICH's
        command = ["env", f"PATH={search_path()}", "mpicxx", option]
        printed = subprocess.run(command, capture_output=True, text=True).stdout
        found = re.search(r"(Open MPI|MPICH)(?: version)? (\d[\w.]*)", printed)
        if found:
            return found[1], found[2]
    return None


def cache() -> Path:
    """Return the user's folder for wheels of this Python on this kind of machine."""
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return private_files.cache_folder() / "horovod" / abi


def kept(wanted: Target) -> Path | None:
    """Return the wheel of an earlier build, unless another user could have made it."""
    if private_files.cache_folder().exists():
        private_files.check(private_files.cache_folder())
    return next(cache().glob(f"horovod-{wanted.version}-*.whl"), None)


def main() -> int:
    """Run the command line; return 0, 2 if nothing can be built, or 1."""
    try:
        wanted = target()
        if installed.version() != wanted.version:
            built = kept(wanted) or build(wanted)
            if subprocess.run([*PIP, "install", "--quiet", str(built)]).returncode:
                raise CollectiveError(
                    f"pip did not install {built}", hint=f"pip install {built}"
                )
        run.install(Path(sysconfig.get_path("scripts")))
    except CollectiveError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{wanted} is installed. Try: horovodrun -np 4 python train.py")
    return 0


def build(wanted: Target) -> Path:
    """Build a wheel and keep it."""
    for program in (os.environ.get("CXX", "c++"), "make"):
        if not shutil.which(program):
            raise UsageError(
                f"Horovod cannot be built: there is no {program}",
                hint="apt install g++ make",
            )
    keep = cache()
    log = keep / f"{wanted.version}.log"
    try:
        private_files.folder(private_files.cache_folder())
        keep.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"Horovod cannot be built: {keep} cannot be written to: {error.strerror}",
            hint="export XDG_CACHE_HOME=FOLDER, one that is yours",
        ) from None
    print(f"Building {wanted}: this takes minutes. Its log:\n{log}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        environment = _environment(Path(name, "tools"))
        _fetch(Path(name), environment, log)
        source = Path(name, f"horovod-{VERSION}")
        if numbers(wanted.tensorflow[1]) >= LEFT_OUT_SINCE:
            leave_out(source / "horovod" / "tensorflow" / "CMakeLists.txt")
        environment |= CHOSEN
        environment["HOROVOD_LOCAL_VERSION"] = wanted.version.partition("+")[2]
        environment["HOROVOD_WITH_MPI" if wanted.mpi else "HOROVOD_WITHOUT_MPI"] = "1"
        # pip's own cache knows a wheel only by its name, not by its target.
        command = [*PIP, "wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
        command += ["--verbose", "--wheel-dir", name, str(source)]
        if _logged(command, environment, log):
            raise CollectiveError(f"{wanted} does not build", hint=f"less {log}")
        (made,) = Path(name).glob("horovod-*.whl")
        # Moved into place when it is complete: another build may look for it now.
        os.replace(shutil.copy(made, keep / f"{os.getpid()}"), keep / made.name)
        return keep / made.name


def _fetch(work: Path, environment: Mapping[str, str], log: Path) -> None:
    """Download the tools and the unpacked source into the folder ``work``."""
    cmake = [] if shutil.which("cmake") else ["cmake"]
    tools = ["install", "--target", str(work / "tools"), *TOOLS, *cmake]
    source = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    source += ["--dest", str(work), f"horovod=={VERSION}"]
    for what, arguments in (("the tools for it", tools), ("its source", source)):
        if _logged([*PIP, *arguments], environment, log):
            raise UsageError(
                f"Horovod cannot be built: pip does not get {what}",
                hint=f"less {log}",
            )
    shutil.unpack_archive(work / f"horovod-{VERSION}.tar.gz", work)


def leave_out(lists: Path) -> None:
    """Remove the file that does not compile from a list of sources."""
    lines = lists.read_text().splitlines(keepends=True)
    rest = [line for line in lines if LEFT_OUT not in line]
    if len(rest) != len(lines) - 1:
        raise CollectiveError(
            f"{LEFT_OUT} is not once in {lists.name}: not the Horovod {VERSION} "
            "that this step was written for",
            hint=f"pip download --no-deps horovod=={VERSION}",
        )
    lists.write_text("".join(rest))


def _environment(tools: Path) -> dict[str, str]:
    """Return the variables for pip and for the compiler."""
    path = search_path()
    env = os.environ | {
        "PATH": os.pathsep.join([path, str(tools / "bin")]),
        "PYTHONPATH": str(tools),
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        # Gloo asks for a CMake so old that CMake 4 refuses to behave like it.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    mpi = shutil.which("mpicxx", path=path)
    if mpi and Path(mpi).is_relative_to(sys.prefix):
        # The wheel looks for MPI first in lib of the environment it is installed in.
        env["LDFLAGS"] = f"-Wl,-rpath,$ORIGIN/../../../.. {env.get('LDFLAGS', '')}"
    return env


def _logged(command: Sequence[str], env: Mapping[str, str], log: Path) -> int:
    with log.open("a") as file:
        return subprocess.run(
            command, env=env, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent
        ).returncode


def numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


if __name__ == "__main__":
    sys.exit(main())
