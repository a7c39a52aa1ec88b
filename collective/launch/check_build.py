"""``--check-build``: what this installation can do, in horovodrun's form."""

from __future__ import annotations

import importlib.util
import shutil

import collective
from collective import library


def text() -> str:
    """The lists, with ``[X]`` before what is installed. Imports none of it."""

    def installed(module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    native = library.path()
    mpi = shutil.which("mpirun") is not None
    parts = {
        "Frameworks": {
            "TensorFlow": installed("tensorflow"),
            "Keras": installed("keras"),
        },
        "Controllers": {
            "this launcher": True,
            "MPI": mpi,
            "Horovod": installed("horovod"),
        },
        "Tensor Operations": {
            "the native core, one host": native.exists(),
            "the native core, several hosts": native.exists() and mpi,
            "MPI (mpi4py)": installed("mpi4py"),
            "TensorFlow's own": installed("tensorflow"),
            "Horovod": installed("horovod"),
        },
    }
    out = [f"collective {collective.__version__}:"]
    for title, entries in parts.items():
        out += ["", f"Available {title}:"]
        out += [f"    [{'X' if ok else ' '}] {name}" for name, ok in entries.items()]
    return "\n".join(out)
