"""Measured times of all-reduces: kept for the next job, and the prediction from them.

One JSON file for each kind of job, in the user's cache folder, so that measurements of
one machine, number of ranks and set of versions never serve for another. Failures are
not kept: a busy machine must not rule out a backend for all later jobs.

The predicted time is latency + bytes / bandwidth [R. Hockney, 1994], with one more term
for backends whose calls take longer for each tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from collective import library
from collective.backends.devices import gpus
from collective.backends.horovod import installed
from collective.environment import Environment
from collective.errors import CollectiveError
from collective.launch import versions
from collective.net import private_files


@dataclass(frozen=True)
class Point:
    """The median time of a call that sums so many tensors of ``size`` bytes together."""

    size: int
    tensors: int
    seconds: float


Found = list[Point] | str  # the measurements, or why there are none


@dataclass(frozen=True)
class Fit:
    """A line through the measurements of one backend, in seconds."""

    latency: float  # of a call
    each: float  # more, for each of its tensors
    per_byte: float  # more; one over the bandwidth

    def seconds(self, sizes: Sequence[int]) -> float:
        """Predicted seconds of one call that sums tensors of these sizes in bytes."""
        return self.latency + self.each * len(sizes) + self.per_byte * sum(sizes)


def fit(points: Sequence[Point]) -> Fit:
    """Least squares of the relative errors, no coefficient below zero.

    Relative, because a prediction 10 % off is as bad at 20 microseconds as at 20
    milliseconds. The constrained optimum is the best of the fits to each subset of
    columns with no negative coefficient, and there are only seven subsets.

    Raises:
        ValueError: Without points, or with one that took no time.
    """
    if not points or min(p.seconds for p in points) <= 0:
        raise ValueError(f"nothing to fit: {points}")
    seconds = np.array([p.seconds for p in points])
    columns = np.array([[1.0, p.tensors, p.size] for p in points]) / seconds[:, None]
    scale = np.linalg.norm(columns, axis=0)
    best, least = np.zeros(3), np.inf
    for count in (1, 2, 3):
        for kept in map(list, itertools.combinations(range(3), count)):
            found, *_ = np.linalg.lstsq(
                columns[:, kept] / scale[kept], np.ones(len(points)), rcond=None
            )
            solution = np.zeros(3)
            solution[kept] = found / scale[kept]
            error = float(np.sum((columns @ solution - 1) ** 2))
            if (found >= 0).all() and error < least:
                best, least = solution, error
    return Fit(*best.tolist())


def job(environment: Environment) -> dict[str, Any]:
    """Everything the speed of an all-reduce depends on: machine, ranks, versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": gpus(),
        "hosts": environment.cross_size,
        "ranks": environment.size,
        "launcher": environment.launcher,
        "versions": versions.installed(),
        "tensorflow": installed.tensorflow(),
        "mpi": _mpi(),
        "core": _core(),
    }


class ProbeCache:
    """The measurements for one kind of ``job``. A broken file counts as none."""

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
