"""Finds the installed versions, which must agree between hosts; prints ``--check-build``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
from collections.abc import Mapping

_PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm"),
    "keras": ("keras",),
    "numpy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "horovod": ("horovod",),
    "collective": ("keras-collective",),
}


def installed() -> dict[str, str]:
    """Return the versions of Python and of the packages for training; imports none."""
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
    """Return the versions that differ between hosts, given each host's versions by name.

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


def check_build() -> str:
    """Describe this installation in horovodrun's form, and imports nothing of it."""
    from collective import library  # its import takes a while

    native, mpirun = library.path().exists(), shutil.which("mpirun") is not None
    tensorflow, keras, mpi4py, horovod = (
        importlib.util.find_spec(module) is not None
        for module in ("tensorflow", "keras", "mpi4py", "horovod")
    )
    parts = {
        "Frameworks": {"TensorFlow": tensorflow, "Keras": keras},
        "Controllers": {"this launcher": True, "MPI": mpirun, "Horovod": horovod},
        "Tensor Operations": {
            "the native core, one host": native,
            "the native core, several hosts": native and mpirun,
            "MPI (mpi4py)": mpi4py,
            "TensorFlow's own": tensorflow,
            "Horovod": horovod,
        },
    }
    lines = [f"collective {installed().get('collective', '0+unknown')}:"]
    for title, entries in parts.items():
        lines += ["", f"Available {title}:"]
        lines += [f"    [{'X' if ok else ' '}] {name}" for name, ok in entries.items()]
    return "\n".join(lines)
