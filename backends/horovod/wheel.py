"""Which build of Horovod fits here, its name, and where it is kept.

A build fits one TensorFlow, one MPI and one Python. So the wheel has the first two in
its version and the third in its folder, and no other build is ever picked up.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from collective.backends.horovod import installed
from collective.errors import UsageError
from collective.net import private_files

VERSION = "0.28.1"
# Horovod's own build variables, which a user may set: HOROVOD_GPU_OPERATIONS=NCCL.
SETTINGS = "HOROVOD_(WITH|GPU|NCCL|CUDA|ROCM|DDL|CCL|CPU_OP|BUILD|DEBUG|MPICXX)"


@dataclass(frozen=True)
class Target:
    """What a build is for.

    Attributes:
        tensorflow: The installed distribution's name and version.
        mpi: Family and version of the MPI that ``mpicxx`` belongs to; None without.
        settings: Names and values of the build variables that the user has set.
    """

    tensorflow: tuple[str, str]
    mpi: tuple[str, str] | None
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def version(self) -> str:
        """Horovod's version with all of it in the local part, as pip spells it."""
        parts = [*self.tensorflow, *(self.mpi or ("no", "mpi"))]
        if self.settings:
            parts.append(hashlib.sha256(repr(self.settings).encode()).hexdigest()[:8])
        return f"{VERSION}+{re.sub('[^a-z0-9]+', '.', '.'.join(parts).lower())}"

    def __str__(self) -> str:
        mpi = " ".join(self.mpi) if self.mpi else "no MPI"
        return f"Horovod {VERSION} for {' '.join(self.tensorflow)} and {mpi}"


def target() -> Target:
    """The target of a build in this environment.

    Raises:
        UsageError: Without TensorFlow.
    """
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
    """PATH with this environment's programs first, whether it is activated or not."""
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
    """The user's folder for wheels of this Python on this kind of machine."""
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return private_files.cache_folder() / "horovod" / abi


def kept(wanted: Target) -> Path | None:
    """The wheel of an earlier build for this target.

    Raises:
        CollectiveError: If another user could have put it there.
    """
    if private_files.cache_folder().exists():
        private_files.check(private_files.cache_folder())
    return next(cache().glob(f"horovod-{wanted.version}-*.whl"), None)
