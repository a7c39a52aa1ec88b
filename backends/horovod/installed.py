"""Which Horovod is installed, and whether it fits: read from files, not imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sysconfig
from pathlib import Path


def version() -> str | None:
    """Return the version of the installed Horovod, with its local part."""
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None


def tensorflow() -> tuple[str, str] | None:
    """Return name and version of the distribution that ``import tensorflow`` loads."""
    for name in importlib.metadata.packages_distributions().get("tensorflow", ()):
        return name.replace("_", "-"), importlib.metadata.version(name)
    return None


def misfit() -> str | None:
    """Return why the installed Horovod does not fit this TensorFlow and this Python.

    Returns:
        A few words; None if it fits.
    """
    folder = _folder()
    if version() is None or folder is None:
        return "Horovod is not installed"
    library = f"mpi_lib{sysconfig.get_config_var('EXT_SUFFIX')}"
    built = [file.name for file in _libraries(folder)]
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
    """Return whether the installed Horovod has NCCL, by the names its library uses."""
    folder = _folder()
    libraries = [] if folder is None else _libraries(folder)
    return any(b"ncclAllReduce" in library.read_bytes() for library in libraries)


def _folder() -> Path | None:
    spec = importlib.util.find_spec("horovod")
    found = spec and spec.submodule_search_locations
    return Path(found[0]) if found else None


def _libraries(folder: Path) -> list[Path]:
    return list((folder / "tensorflow").glob("mpi_lib*.so"))
