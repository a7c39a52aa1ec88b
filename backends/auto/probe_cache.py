"""The measurements of probes, kept for the next job of the same kind.

One JSON file for each kind of job, in the user's cache folder, so that measurements of
one machine, number of ranks and set of versions never serve for another. Failures are
not kept: a busy machine must not rule out a backend for all later jobs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from collective import library
from collective.backends.auto.prediction import Point
from collective.backends.devices import gpus
from collective.backends.horovod import installed
from collective.environment import Environment
from collective.errors import CollectiveError
from collective.launch import versions
from collective.net import private_files

Found = list[Point] | str  # the measurements, or why there are none


def job(environment: Environment) -> dict[str, Any]:
    """Everything the speed of an all-reduce depends on: machine, ranks, versions."""
    found = versions.installed()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": gpus(),
        "hosts": environment.cross_size,
        "ranks": environment.size,
        "launcher": environment.launcher,
        "python": platform.python_version(),
        "tensorflow": installed.tensorflow(),
        "horovod": installed.version(),
        "mpi4py": found.get("mpi4py"),
        "mpi": _mpi(),
        "collective": [found.get("collective"), _core()],
    }


class ProbeCache:
    """The measurements for one kind of job.

    Args:
        of: The kind of job (``job``).

    Attributes:
        path: The file; it need not exist. A broken one counts as none.
    """

    def __init__(self, of: Mapping[str, Any]):
        self.of = json.loads(json.dumps(of))
        name = hashlib.sha256(json.dumps(self.of, sort_keys=True).encode()).hexdigest()
        self.path = private_files.cache_folder() / "probes" / f"{name[:16]}.json"

    def read(self) -> dict[str, list[Point]]:
        """The measurements, by backend."""
        try:
            kept = json.loads(self.path.read_text())
            if kept["job"] != self.of:
                return {}
            return {
                name: [_point(point) for point in points]
                for name, points in kept["found"].items()
                if not isinstance(points, str)  # a failure, kept by an older version
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def write(self, found: Mapping[str, Found]) -> bool:
        """Replaces the file by the measurements among ``found``; whether it could."""
        plain = {
            name: [dataclasses.asdict(point) for point in points]
            for name, points in found.items()
            if not isinstance(points, str)
        }
        part = self.path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError, CollectiveError):
            private_files.folder(private_files.cache_folder())
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"job": self.of, "found": plain}, indent=1))
            part.replace(self.path)
            return True
        return False


def _point(kept: Mapping[str, Any]) -> Point:
    point = Point(int(kept["size"]), int(kept["tensors"]), float(kept["seconds"]))
    if not 0 < point.seconds < float("inf"):
        raise ValueError(f"{point} was never measured")
    return point


def _processor() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if found := re.search(r"^model name\s*:\s*(.*?)\s*$", text, re.M):
            return found[1]
    return platform.machine()


def _mpi() -> str | None:
    from collective.launch import mpi

    try:
        return str(mpi.find())
    except CollectiveError:
        return None


def _core() -> str | None:
    """A hash of the core as it was built: it changes more often than its version."""
    try:
        return hashlib.sha256(library.path().read_bytes()).hexdigest()[:16]
    except OSError:
        return None
