"""Which Horovod is installed, and whether it fits: from its files, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sysconfig
from pathlib import Path


def version() -> str | None:
    """The version of the installed Horovod, with its local part."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None


def tensorflow() -> tuple[str, str] | None:
    """Name and version of the distribution that ``import tensorflow`` would load."""
    for name in importlib.metadata.packages_distributions().get("tensorflow", ()):
        return name.replace("_", "-"), importlib.metadata.version(name)
    return None


def misfit() -> str | None:
    """Why the installed Horovod cannot be used with this TensorFlow and this Python.

    Returns:
        A few words; None where it can.
    """
    spec = importlib.util.find_spec("horovod")
    if version() is None or spec is None or not spec.submodule_search_locations:
        return "Horovod is not installed"
    folder = Path(spec.submodule_search_locations[0])
    library = f"mpi_lib{sysconfig.get_config_var('EXT_SUFFIX')}"
    built = [file.name for file in (folder / "tensorflow").glob("mpi_lib*.so")]
    if not built:
        return "Horovod is installed, but was built without TensorFlow"
    if library not in built:
        return f"Horovod was built for another Python ({built[0]})"
    here = tensorflow()
    if here is None:
        return "TensorFlow is not installed"
    try:
        wanted = json.loads((folder / "metadata.json").read_text()).get("tensorflow")
    except (OSError, ValueError) as error:
        return f"the installed Horovod does not say what it was built for: {error}"
    if str(wanted).replace("-", "") != here[1]:
        return f"Horovod was built for TensorFlow {wanted}, and {here[1]} is installed"
    return None


def has_nccl() -> bool:
    """Whether the installed Horovod was built with NCCL, by the names its library uses."""
    spec = importlib.util.find_spec("horovod")
    folders = (spec.submodule_search_locations if spec else None) or []
    libraries = [
        f for path in folders for f in Path(path).glob("tensorflow/mpi_lib*.so")
    ]
    return any(b"ncclAllReduce" in library.read_bytes() for library in libraries)
