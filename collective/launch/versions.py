"""Versions that must agree between the hosts of a job."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping

_PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm"),
    "keras": ("keras",),
    "numpy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "horovod": ("horovod",),
    "collective": ("collective",),
}


def installed() -> dict[str, str]:
    """Versions of Python and of what training needs, without importing it."""
    found = {"python": platform.python_version()}
    for name, packages in _PACKAGES.items():
        for package in packages:
            try:
                found[name] = importlib.metadata.version(package)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def differing(versions: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What is not the same on every host, of versions by name for each host.

    Returns:
        For each name that differs, the hosts of each version: ``3.15 on a; none on b, c``.
    """
    found = {}
    for name in dict.fromkeys(name for each in versions.values() for name in each):
        hosts: dict[str, list[str]] = {}
        for host, of_host in versions.items():
            hosts.setdefault(of_host.get(name) or "none", []).append(host)
        if len(hosts) > 1:
            found[name] = "; ".join(f"{v} on {', '.join(h)}" for v, h in hosts.items())
    return found
