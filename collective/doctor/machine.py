"""Examines this machine. Each question has a deadline; only one imports TensorFlow."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from collective import library, python_command
from collective.errors import CollectiveError
from collective.launch import mpi, versions
from collective.launch.processes import run
from collective.net import interfaces

_SECONDS = 60
_MPI4PY = (
    "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)
# horovodrun --check-build prints the same, but imports every framework: half a minute.
_HOROVOD = """
import horovod.tensorflow as hvd
kinds = ("MPI", "Gloo", "NCCL", "CCL", "DDL")
print("TensorFlow", *(k for k in kinds if getattr(hvd, k.lower() + "_built")()))
"""


def examine_machine() -> dict[str, Any]:
    """Return the result of every question below, in types that JSON has.

    Sizes are in bytes. ``clock`` is the time before and after, in seconds since 1970.
    """
    start = time.time()
    return {
        "host": socket.gethostname(),
        "versions": versions.installed(),
        "mpi": _mpi(),
        "horovod": _horovod(),
        "native": _native(),
        "backends": _backends(),
        "gpus": _gpus(),
        "nccl": _nccl(),
        "cores": {"usable": len(os.sched_getaffinity(0)), "all": os.cpu_count()},
        "memory": _memory(),
        "shm": _shm(),
        "interfaces": [vars(i) for i in interfaces.interfaces()],
        "clock": (start, time.time()),
    }


def _ask(*words: str) -> tuple[int, str]:
    """Return the exit code and output of a command, or -1 and why it does not run."""
    answer = run(words, _SECONDS)
    if answer.code is None:
        return -1, answer.error
    return answer.code, answer.out if answer.code == 0 else answer.error


def _mpi() -> dict[str, Any]:
    found: dict[str, Any] = {"mpirun": "", "family": "", "mpi4py": "", "error": ""}
    try:
        here = mpi.find()
        found |= {"mpirun": here.program, "family": str(here)}
    except CollectiveError as error:
        found["error"] = error.message
    if importlib.util.find_spec("mpi4py") is not None:
        code, output = _ask(sys.executable, "-c", _MPI4PY)
        words = output.split() if code else output.strip().splitlines()[:1]
        # "Open MPI v5.0.11, package: ..." or "MPICH Version: 5.0.2"
        found["mpi4py" if code == 0 else "error"] = " ".join(words).split(", ")[0][
            -300:
        ]
    return found


def _horovod() -> dict[str, Any]:
    if importlib.util.find_spec("horovod") is None:
        return {"installed": False, "built_for": []}
    code, output = _ask(sys.executable, "-c", _HOROVOD)
    return {"installed": True, "built_for": output.split() if code == 0 else []}


def _native() -> dict[str, Any]:
    path = library.path()
    found: dict[str, Any] = {"built": path.exists(), "loads": False, "error": ""}
    code, output = _ask(*python_command.command("collective.mpi_library"))
    found["mpi"] = "" if code else output.strip()
    if found["built"]:
        try:
            library.extension()
            found["loads"] = True
        except CollectiveError as error:
            found["error"] = error.message
    return found


def _backends() -> dict[str, Any] | None:
    """Return the backends, asked in a process of its own, or None if there are none."""
    code, output = _ask(*python_command.command("collective.backends"))
    try:
        return json.loads(output) if code == 0 else None
    except ValueError:
        return None


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=name,memory.total,driver_version"
    code, output = _ask("nvidia-smi", query, "--format=csv,noheader")
    lines = [] if code else output.splitlines()
    return [line.strip() for line in lines if line.strip()]


def _nccl() -> str:
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.startswith("nvidia-nccl"):
            return f"{distribution.version} ({name})"
    for folder in ("/usr/lib", "/usr/lib64", "/usr/local/cuda/lib64"):
        for file in Path(folder).glob("**/libnccl.so.*.*"):
            return f"{file.name.partition('.so.')[2]} ({file})"
    return ""


def _memory() -> dict[str, int]:
    memory = psutil.virtual_memory()
    return {"all": memory.total, "free": memory.available}


def _shm() -> dict[str, int]:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return {"all": 0, "free": 0}
    return {
        "all": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
    }
